"""Who waits for whom, and the split that would balance them, from numbers made by hand."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl.config.load import compose, load_old_run, parse
from pipelinerl.inspect import status
from pipelinerl.inspect.balance import (
    Balance,
    Division,
    Divisions,
    Share,
    balance_of,
    better_split,
    cheaper_steps,
    share_of,
    splits_of,
)
from pipelinerl.inspect.finding import found
from pipelinerl.inspect.page.build import collect
from pipelinerl.inspect.report import summary_lines, write_report
from pipelinerl.inspect.series import Series
from pipelinerl.inspect.why.attempts import causes
from pipelinerl.inspect.why.metrics import METRICS
from pipelinerl.launcher.terminal import ProgressLines
from pipelinerl.records import SamplesProcessed
from pipelinerl.streams import set_streams_backend
from pipelinerl.world import Cluster, Node, WorldMap, map_world
from tests.evidence import evidence
from tests.run_folder import Story, make_run

STEPS = 12


def steps(wait_s: list[float], step_s: float = 1.0) -> list[dict]:
    return [
        {"step": i, "time": float(i), "wait_s": wait, "step_s": step_s, "push_wait_s": 0.0}
        for i, wait in enumerate(wait_s)
    ]


def actor(held: list[float], busy: float | None = None) -> list[dict]:
    more = {} if busy is None else {"workers_busy": busy}
    return [{"step": i, "time": float(i), "slots_held": share, **more} for i, share in enumerate(held)]


def certain(waits: float, held: float, busy: float = 0.0) -> Balance:
    return Balance(trainer_waits=Share(waits, 0.0), slots_held=Share(held, 0.0), workers_busy=Share(busy, 0.0))


def world(devices: int, *overrides: str, cores: int = 0) -> Divisions | None:
    kind = "cpu" if cores else "cuda"
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", *overrides]
    cfg = parse(compose("base_cpu" if cores else "base", required))
    node = Node(rank=0, hostname="127.0.0.1", devices=devices, cores=tuple(range(cores)))
    return splits_of(cfg, map_world(cfg, Cluster(accelerator=kind, nodes=(node,)), check=False))


def test_share_has_the_error_of_a_ratio() -> None:
    """Residuals of ± 0.5 around 1/4 of 2: their squares add up to 1, times 4/3, over a total of 8."""
    assert share_of([1, 0, 1, 0], [2, 2, 2, 2]) == (0.25, pytest.approx(math.sqrt(4 / 3) / 8))
    assert share_of([1], [2]) == (0.5, math.inf)
    assert Share(0.5, 0.05).least == pytest.approx(0.3)
    assert Share(0.1, 0.05).least == 0


def test_balance_is_of_the_steps_after_the_first_quarter_and_of_the_actors_points_among_them() -> None:
    seen = balance_of(Series(finetune=steps([50.0] * 3 + [1.0] * 9, step_s=3.0), actor=actor([0.9] * 3 + [0.2] * 9)))
    assert seen is not None
    assert seen.trainer_waits == (0.25, 0.0)
    assert seen.slots_held == (pytest.approx(0.2), pytest.approx(0.0))
    assert seen.ratio == pytest.approx(0.75 / 0.8)
    assert balance_of(Series(finetune=steps([1.0] * 10), actor=actor([0.0] * 10))) is not None, "8 steps are left"
    assert balance_of(Series(finetune=steps([1.0] * 9), actor=actor([0.0] * 9))) is None
    silent = Series(finetune=steps([1.0] * 12), actor=[{"step": 3, "time": 3.0}] * 12)
    assert balance_of(silent) is None, "the actor says nothing about it"


def test_balance_is_of_the_newest_128_steps() -> None:
    run = Series(finetune=steps([1.0] * 272 + [0.0] * 128), actor=actor([0.9] * 272 + [0.2] * 128))
    seen = balance_of(run)
    assert seen is not None
    assert (seen.trainer_waits.mean, seen.slots_held.mean) == (0.0, pytest.approx(0.2))
    with_one_older = balance_of(Series(finetune=steps([1.0] * 273 + [0.0] * 127), actor=actor([0.2] * 400)))
    assert with_one_older is not None
    assert with_one_older.trainer_waits.mean == pytest.approx(1 / 129)


@pytest.mark.parametrize(
    ("waits", "held", "busy", "narrow"),
    [
        (0.05, 0.05, 0.0, None),
        (0.41, 0.05, 0.79, "generation"),
        (0.05, 0.41, 0.0, "training"),
        (0.41, 0.41, 0.79, "between"),
        (0.41, 0.05, 0.81, "workers"),
        (0.41, 0.41, 0.81, "workers"),
        (0.05, 0.05, 1.0, None),
        (0.05, 0.41, 1.0, "training"),
    ],
)
def test_narrow_side_is_the_one_that_the_other_waits_for(
    waits: float, held: float, busy: float, narrow: str | None
) -> None:
    assert certain(waits, held, busy).narrow == narrow


def test_workers_are_full_only_for_certain_and_where_the_run_says_so() -> None:
    """Half of the points say .7, half 1.0: .85 ± .15 / √11 at twelve points, so at least .67 at four errors."""
    waiting, calm = steps([1.0] * 16), [0.0] * 16
    points = actor(calm, 1.0)
    for point in points[::2]:
        point["workers_busy"] = 0.7
    doubtful = balance_of(Series(finetune=waiting, actor=points))
    assert doubtful is not None
    assert doubtful.workers_busy == (pytest.approx(0.85), pytest.approx(0.15 / math.sqrt(11)))
    older = balance_of(Series(finetune=waiting, actor=actor(calm)))
    assert older is not None
    assert (doubtful.narrow, older.narrow) == ("generation", "generation")


def test_narrow_nothing_is_said_of_what_may_be_noise() -> None:
    """One long wait, as of an evaluation, among steps that did not wait: a quarter of the time, ± a quarter."""
    wait = [0.0] * 20 + [7.0] + [0.0] * 6
    seen = balance_of(Series(finetune=steps(wait), actor=actor([0.0] * 27)))
    assert seen is not None
    assert seen.trainer_waits.mean == pytest.approx(7 / 28)
    assert seen.narrow is None


def test_better_split_moves_a_device_to_the_narrow_side() -> None:
    """Generation gives half of what the trainer takes: 1 per 4 devices against 2 per 4. 5 + 3 devices: 1.25 and 1.5."""
    splits = world(8)
    assert splits is not None
    assert (splits.now.generating, splits.now.training) == (0.5, 0.5)
    best, gain = better_split(certain(0.5, 0.0), splits) or (None, 0.0)
    assert best is not None
    assert best.overrides == ("world.actor_fraction=5", "world.finetune_fraction=3")
    assert gain == pytest.approx(1.25)
    best, gain = better_split(certain(0.0, 0.5), splits) or (None, 0.0)
    assert best is not None
    assert best.overrides == ("world.actor_fraction=3", "world.finetune_fraction=5")
    assert gain == pytest.approx(1.25)
    assert better_split(certain(0.5, 0.5), splits) is None
    assert better_split(certain(0.15, 0.0), splits) is None, "3 devices train .88 of what is needed: no gain in eighths"


def test_better_split_must_be_certainly_faster() -> None:
    """At 4 errors less the trainer waits for 0.14 of its time, and 3 of 4 devices could not keep up."""
    doubtful = replace(certain(0.5, 0.0), trainer_waits=Share(0.5, 0.09))
    splits = world(8)
    assert splits is not None
    assert doubtful.narrow == "generation"
    assert better_split(doubtful, splits) is None


def test_splits_keep_servers_and_groups_of_the_trainer_whole() -> None:
    whole = ("vllm_config.vllm_kwargs.tensor-parallel-size=2", "finetune.seq_parallel=2")
    splits = world(8, *whole)
    assert splits is not None
    assert [split.overrides[0] for split in splits.others] == [f"world.actor_fraction={n}" for n in (2, 4, 6)]


def test_splits_of_cores_are_by_slots_and_one_rank_trains_without_an_engine_for_several() -> None:
    splits = world(2, cores=4)
    assert splits is not None
    assert [split.overrides for split in splits.others] == [
        (f"world.cpu_slots={slots}", f"world.actor_fraction={slots - 1}", "world.finetune_fraction=1")
        for slots in (2, 3, 4)
    ]
    best, gain = better_split(certain(0.5, 0.0), splits) or (None, 0.0)
    assert best is not None
    assert best.overrides[0] == "world.cpu_slots=3"
    assert gain == pytest.approx(4 / 3), "two thirds of the cores generate 4/3 of now, a third trains 4/3 of it"
    ranks = world(2, "finetune.engine=fsdp2", cores=4)
    assert ranks is not None
    assert len(ranks.others) == 1 + 2 + 3
    alone = world(2, cores=2)
    assert alone is not None
    assert better_split(certain(0.5, 0.0), alone) is None
    assert better_split(certain(0.6, 0.02), alone) is None, "the present split is no other one"


@pytest.mark.parametrize(
    "override", ["schedule=conventional", "max_lag_steps=0", "world.share_devices=true", "debug.mode=actor"]
)
def test_splits_of_a_run_whose_sides_wait_by_design_are_not_asked_for(override: str) -> None:
    more = {"schedule=conventional": ("max_lag_steps=0",)}
    assert world(8, override, *more.get(override, ())) is None


SPLITS = Divisions(
    now=Division(generating=0.5, training=0.5),
    others=(Division(generating=5 / 8, training=3 / 8, overrides=("world.actor_fraction=5",)),),
    max_lag_steps=3,
    max_rollouts=64,
    rollout_workers=2,
)


@pytest.mark.parametrize(
    ("wait", "held", "busy", "name", "words"),
    [
        (1.0, 0.0, 0.5, "trainer waits", ("50%", "gives 0.50 of", "world.actor_fraction=5", "1.25 ×", "(it is 64)")),
        (
            1.0,
            0.0,
            0.9,
            "rollout workers are full",
            ("50%", "90%", "actor.rollout_workers (it is 2)", "domain cheaper"),
        ),
        (
            0.0,
            0.5,
            0.0,
            "servers wait",
            ("keeps 50%", "up to 2.0 ×", "No other split", "A step is cheaper with shorter"),
        ),
        (1.0, 0.5, 0.0, "both wait", ("each side waits", "max_lag_steps (it is 3)")),
    ],
)
def test_alarm_says_by_how_much_and_what_to_set_and_is_no_cause_of_not_learning(
    wait: float, held: float, busy: float, name: str, words: tuple[str, ...]
) -> None:
    run = evidence(finetune=steps([wait] * 20), actor=actor([held] * 20, busy), splits=SPLITS)
    (alarm,) = found(METRICS, run)
    assert (alarm.title, alarm.step) == (name, None)
    assert [word for word in words if word not in alarm.line()] == [], alarm.line()
    assert causes(run) == []


def test_cheaper_steps_names_the_prompts_share_recomputation_and_lengths() -> None:
    """100 tokens, 40 of them shared, so 60 are computed, and 15 of them trained."""
    points = [{"step": i, "input_tokens": 100, "shared_tokens": 40, "tokens": 15} for i in range(2)]
    series, limit = Series(finetune=points), "llm.parameters.max_tokens is 64"

    def of(*overrides: str, seen: Series = series) -> str:
        required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", "llm.parameters.max_tokens=64"]
        return cheaper_steps(parse(compose("base", [*required, *overrides])), seen)

    assert of("finetune.gradient_checkpointing=true") == (
        "shorter prompts (75% of the tokens that it computes are not trained), finetune.gradient_checkpointing=auto, "
        f"which recomputes no more layers than memory asks for, shorter answers ({limit})"
    )
    assert of("finetune.share_prefixes=off").startswith("finetune.share_prefixes=auto or shorter prompts (75%")
    assert of(seen=Series(finetune=[])) == f"shorter answers ({limit})"


def test_alarm_is_silent_in_a_balanced_run_and_where_the_split_is_not_asked_for() -> None:
    balanced = evidence(finetune=steps([0.05] * 20), actor=actor([0.05] * 20), splits=SPLITS)
    assert found(METRICS, balanced) == []
    assert found(METRICS, evidence(finetune=steps([1.0] * 20), actor=actor([0.0] * 20))) == []


def test_status_summary_report_and_the_live_watch_say_the_same(tmp_path: Path) -> None:
    many = 16
    waits, held = [2.0] * many, [0.0] * many
    set_streams_backend("files")
    story = Story(steps=many, finetune={"wait_s": waits, "push_wait_s": [0.0] * many}, actor={"slots_held": held})
    run = make_run(tmp_path / "run", story)
    cfg = load_old_run(run)
    node = Node(rank=0, hostname="127.0.0.1", devices=2, cores=(0, 1, 2, 3))
    made: WorldMap = map_world(cfg, Cluster(accelerator="cpu", nodes=(node,)), check=False)
    made.save(run)
    text, fix = "waits for data in 67% of its time", "world.cpu_slots=4 world.actor_fraction=3"
    (line,) = [line for line in status.screen(run) if line.startswith("balance")]
    assert text in line
    assert fix in line
    summary = write_report(run, cfg, launched=0.0, started=0.0)
    assert json.loads((run / "summary.json").read_text())["balance"]["trainer_waits"] == pytest.approx(2 / 3)
    (line,) = [line for line in summary_lines(summary, run) if line.startswith("balance")]
    assert fix in line
    page = collect(run)
    assert ("the trainer waits for data", "67%") in page["figures"]
    assert [alarm["title"] for alarm in page["alarms"]] == ["trainer waits"]
    lines: list[str] = []
    progress = ProgressLines(run, cfg=cfg, say=lines.append)
    progress.add_message(SamplesProcessed(samples_processed=8, step=many, timestamp=time.time() + 1))
    (line,) = [line for line in lines if line.startswith("speed: trainer waits")]
    assert fix in line
