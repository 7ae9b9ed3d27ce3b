"""The data of the report, by hand: curves, intervals, survivorship, time, and what is chosen to be shown."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from omegaconf import OmegaConf

from pipelinerl.config.load import load_old_run
from pipelinerl.config.sections import Config
from pipelinerl.inspect import samples
from pipelinerl.inspect.curves import wilson
from pipelinerl.inspect.decode import TokenText
from pipelinerl.inspect.page import browser, build, data
from pipelinerl.inspect.report import RunRecords
from pipelinerl.inspect.samples import SeenRollout
from pipelinerl.inspect.why import evidence
from pipelinerl.records import (
    EvaluationDone,
    Rollout,
    SamplesProcessed,
    ScoredSequence,
    TrainingSequence,
    WeightUpdateSuccess,
)
from pipelinerl.streams import set_streams_backend
from tests.run_folder import ATTEMPTS, GROUPS, Story, make_run, make_tokenizer


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("page") / "run", Story(steps=8))


@pytest.fixture(autouse=True)
def files() -> None:
    set_streams_backend("files")


@pytest.fixture(scope="module")
def text() -> TokenText:
    return TokenText(make_tokenizer())


def seen(text: TokenText, *, step: int = 3, tokens: int = 4, group: str = "0-0", attempt: int = 0) -> SeenRollout:
    ids = [*text.encode("ab"), *text.encode("cdefghij")[:tokens], *([97] * max(0, tokens - 8))]
    own = len(ids) - 2
    sequence = TrainingSequence(
        token_ids=np.array(ids, np.int32),
        logprobs=np.full(own, -0.5, np.float32),
        spans=np.array([[2, 3, 1], [3, len(ids), 2]], np.int32),
        finish_reason="stop",
    )
    score = ScoredSequence(
        sequence_id=f"{group}/{attempt}/0",
        logprobs=np.full(own, -0.25, np.float32),
        entropy=np.full(own, 1.5, np.float16),
        altered=np.arange(own) == 1,
    )
    rollout = Rollout(
        attempt=attempt, reward=1.0, sequences=(sequence,), metrics={"success": 1.0}, latency_s=0.0, num_llm_calls=1
    )
    return SeenRollout(
        group_id=group,
        domain="d",
        dataset="train",
        problem='{"q": "x"}',
        rollout=rollout,
        outcome="trained",
        step=step,
        dispatched_version=1,
        advantages=(0.5,),
        scores=(score,),
    )


def test_thinned_keeps_first_last_and_every_spike() -> None:
    values = [0.0] * 10_000
    values[777], values[5_001] = 9.0, -9.0
    kept = data.thinned(values, 100)
    assert len(kept) <= 102
    assert {0, 777, 5_001, 9_999} <= set(kept)
    assert data.thinned([1.0, 2.0]) == [0, 1]


def test_series_takes_the_last_point_of_a_step_and_leaves_out_what_is_unknown() -> None:
    points = [{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 1, "a": 3.0}, {"step": 4, "a": 0.123456789}]
    assert data.series(points, "a") == ([1, 4], [3.0, 0.12346])


@pytest.mark.parametrize(
    ("share", "count", "low", "high"), [(0.5, 100, 0.40383, 0.59617), (0.0, 10, 0.0, 0.27753), (1.0, 10, 0.72247, 1.0)]
)
def test_wilson_interval_by_hand(share: float, count: int, low: float, high: float) -> None:
    assert wilson(share, count) == (pytest.approx(low, abs=2e-5), pytest.approx(high, abs=2e-5))


def test_evaluation_shows_data_sets_only_where_there_are_several() -> None:
    metrics = {"a/success": 0.25, "b/success": 0.75, "complete": 1.0}
    done = EvaluationDone(version=3, success=0.5, reward=0.1, num_rollouts=64, metrics=metrics)
    assert data.evaluation(done)["parts"] == {"a": 0.25, "b": 0.75}
    one = EvaluationDone(version=3, success=0.5, reward=0.1, num_rollouts=64, metrics={"a/success": 0.25})
    assert data.evaluation(one)["parts"] == {}


def test_parts_are_found_of_domains_and_of_data_sets_with_slashes() -> None:
    names = ("success", "math/success", "openai/gsm8k:main@train/success", "eval/test/success", "math/reward")
    assert data.part_names([dict.fromkeys(names, 0.5)], "success") == [
        "math/success",
        "openai/gsm8k:main@train/success",
    ]


def test_survivorship_adds_counts_and_weighs_means() -> None:
    base = "survivorship/lag"
    points = [
        {f"{base}/count": 1, f"{base}/mean_tokens": 10.0, f"{base}/mean_reward": 1.0},
        {f"{base}/count": 3, f"{base}/mean_tokens": 2.0, f"{base}/mean_reward": 0.0, "dropped_by_length/1": 0.5}
        | {f"dropped_by_length/{i}": 0.1 * i for i in range(2, 11)},
    ]
    found = data.survivorship(points)
    assert found["outcomes"] == [{"outcome": "lag", "count": 4, "tokens": 4.0, "reward": 0.25}]
    assert found["deciles"][0] == 0.5
    assert len(found["deciles"]) == 10


def test_time_by_role_is_what_the_metrics_add_up_to(run_dir: Path) -> None:
    trainer, servers = data.time_by_role(evidence.read_source(run_dir))
    assert dict(trainer["parts"]) == {
        "training": 7.0,
        "waiting for data": pytest.approx(2.8),
        "waiting for a weight update": pytest.approx(1.4),
        "other: checkpoints, evaluation": pytest.approx(14.0 - 7.0 - 2.8 - 1.4),
    }
    assert sum(seconds for _, seconds in servers["parts"]) == pytest.approx(14.0)


def test_evaluations_have_a_time_of_their_own() -> None:
    """From the update of its version to its result, within the run's metrics: 20 − 12, and 100 − 90."""
    updates = [WeightUpdateSuccess(version=v, servers=(), timestamp=t) for v, t in ((0, 8.0), (5, 90.0), (6, 95.0))]
    done = [
        EvaluationDone(version=v, success=0.5, reward=0.5, num_rollouts=8, metrics={}, timestamp=t)
        for v, t in ((0, 20.0), (5, 130.0), (7, 99.0))
    ]
    records = RunRecords(trainer=list(updates), evaluations=done)
    assert data.evaluating_seconds(records, 12.0, 100.0) == pytest.approx(18.0)


def test_domains_own_metrics_have_charts_and_their_spreads_have_none() -> None:
    point = {"step": 3, "time": 1.0, "reward": 1.0, "reward_std": 0.1, "success": 1.0, "latency_s": 2.0}
    own = {"moves": 4.0, "moves_min": 1, "moves_max": 9, "moves_std": 2.0, "depth_max": 7, "math/moves": 3.0}
    charts = data.own_charts([point | own])
    assert [chart["title"] for chart in charts] == ["depth_max", "moves"]
    assert charts[1]["lines"] == [{"label": "moves", "x": [3], "y": [4.0]}]


def test_changed_keys_are_those_that_differ_from_the_defaults(run_dir: Path) -> None:
    changed = {key: (value, default) for key, value, default in data.changed_keys(load_old_run(run_dir))}
    assert changed["finetune.max_train_steps"] == ("8", "1000")
    assert changed["max_lag_steps"] == ("3", "8")
    assert "attempts" not in changed
    assert "finetune.rl.final_entropy_bonus" not in changed, "an interpolation that was not touched"


def lying_in(folder: Path, config: Config) -> Config:
    """The configuration of a run that was moved: its folder is where it lies now."""
    return config.model_copy(update={"output_dir": str(folder), "model_path": str(folder / "model")})


def test_load_old_run_fills_in_keys_that_came_since_and_forgets_others(run_dir: Path, tmp_path: Path) -> None:
    config = (run_dir / "conf" / "config.yaml").read_text()
    old = config.replace("archive:\n  archive_mb: 256\n", "bygone:\n  key: 1\n")
    assert old != config
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(old)
    assert load_old_run(tmp_path) == lying_in(tmp_path, load_old_run(run_dir))


def test_load_old_run_reads_a_run_whose_domain_has_keys_of_its_own(run_dir: Path, tmp_path: Path) -> None:
    config = OmegaConf.load(run_dir / "conf" / "config.yaml")
    config.actor.agent_max_loops, config.sandbox_timeout = 3, 10.0
    config.extra_keys = ["actor.agent_max_loops", "sandbox_timeout"]
    (tmp_path / "conf").mkdir()
    OmegaConf.save(config, tmp_path / "conf" / "config.yaml")
    assert load_old_run(tmp_path) == lying_in(tmp_path, load_old_run(run_dir))


def test_sequence_data_has_every_number_of_a_sampled_token(text: TokenText) -> None:
    (one,) = browser.as_data(seen(text), text)["sequences"]
    assert "".join(one["pieces"]) == "abcdef"
    assert one["at"] == [2, 3, 4, 5]
    assert one["versions"] == [1, 2, 2, 2]
    assert one["logprobs"] == [-500] * 4
    assert one["trained"] == [-250] * 4
    assert one["entropy"] == [1500] * 4
    assert one["altered"] == [1]
    assert one["advantage"] == 0.5


def test_sequence_data_of_a_long_sequence_leaves_out_its_middle(text: TokenText) -> None:
    rollout = seen(text, tokens=9_000)
    total = len(rollout.rollout.sequences[0].token_ids)
    (one,) = browser.as_data(rollout, text)["sequences"]
    assert len(one["pieces"]) == browser.MAX_TOKENS == 3000
    assert one["omitted"] == [browser.MAX_TOKENS // 3, total - browser.MAX_TOKENS]
    assert len(one["at"]) == len(one["versions"]) == len(one["logprobs"]) == browser.MAX_TOKENS - 2


def test_candidates_cover_the_run_evenly_whatever_is_cut(text: TokenText) -> None:
    candidates = samples.Candidates(per_step=2)
    candidates.add(seen(text, step=step, group=f"0-{step}", attempt=a) for step in range(64) for a in range(3))
    assert candidates.seen == 192
    steps = [rollout.step for rollout in candidates.in_turn()]
    assert len(steps) == 128
    assert sorted(set(steps[:18])) == [0, 7, 15, 23, 31, 39, 47, 55, 63]


def test_within_stops_at_its_bytes(text: TokenText) -> None:
    rollouts = [seen(text, attempt=attempt) for attempt in range(10)]
    size = len(json.dumps(browser.as_data(rollouts[0], text), ensure_ascii=False).encode())
    assert [one["id"] for one in browser.within(rollouts, text, 3 * size)] == [f"0-0/{a}" for a in range(3)]


def test_runs_of_one_page_have_names_that_tell_them_apart(run_dir: Path, tmp_path: Path) -> None:
    folders = [Path("/r/ppo/seed 1"), Path("/r/gspo/seed 1"), Path("/r/gspo/seed 2")]
    assert build.names_of(folders) == ["ppo/seed 1", "gspo/seed 1", "gspo/seed 2"]
    assert build.names_of(folders[1:]) == ["seed 1", "seed 2"]
    assert build.names_of([Path("/r/x"), Path("/r/x")]) == ["x", "x"]
    shutil.copytree(run_dir, tmp_path / "other" / run_dir.name)
    runs = build.collect_all([run_dir, tmp_path / "other" / run_dir.name])
    assert [run["name"] for run in runs] == build.names_of([run_dir, tmp_path / "other" / run_dir.name])
    assert len({run["name"] for run in runs}) == 2


def test_build_page_stays_within_its_size(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build.collect(run_dir)
    monkeypatch.setattr(build, "MAX_PAGE_BYTES", len(build.build_page([run | {"rollouts": run["rollouts"][:8]}])))
    page = build.build_page([run])
    assert len(page) <= build.MAX_PAGE_BYTES
    document = json.loads(gzip.decompress(build.encode([run])))
    assert document["runs"][0]["name"] == "run"


@pytest.mark.parametrize("count", [4_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_page_of_thousands_of_rollouts_is_five_megabytes_at_most(count: int, tmp_path: Path) -> None:
    steps = count // (GROUPS * ATTEMPTS)
    run_dir = make_run(tmp_path / "run", Story(steps=steps, said=" and so on" * 10))
    run = build.collect(run_dir)
    assert f" of {count:,} training rollouts" in run["note"]
    assert len({one["step"] for one in run["rollouts"]}) >= 50
    assert 10**6 < len(build.build_page([run])) <= 5 * 2**20


def test_build_page_what_a_model_says_cannot_leave_the_data(run_dir: Path) -> None:
    run = build.collect(run_dir) | {"name": "</script><b>{{DATA}}"}
    page = build.build_page([run]).decode()
    assert page.count("</script>") == 2
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_unreadable_share_counts_unknown_and_broken_tokens(text: TokenText) -> None:
    good = seen(text)
    assert evidence.unreadable_share([good], text) == 0.0
    sequence = good.rollout.sequences[0]
    ids = sequence.token_ids.copy()
    ids[3] = 60_000
    sequences = (msgspec.structs.replace(sequence, token_ids=ids),)
    bad = SeenRollout(**{**vars(good), "rollout": msgspec.structs.replace(good.rollout, sequences=sequences)})
    assert evidence.unreadable_share([bad], text) == 0.25
    assert evidence.unreadable_share([], text) is None


def test_page_of_a_run_that_imitates_has_its_losses_and_no_figures_of_rollouts(run_dir: Path) -> None:
    step = {"sft_loss": 2.0, "sequences": 0.0, "tokens": 10.0, "step_s": 1.0, "lag_mean": 0.0, "reward": 0.0}
    losses = [2.0, 0.5]
    trained = [
        SamplesProcessed(samples_processed=4 * n, step=n, metrics=step | {"sft_loss": loss}, timestamp=100.0 + n)
        for n, loss in enumerate(losses, 1)
    ]
    points = [{"step": 0, "time": 100.0, "sft_test_loss": 3.0}] + [
        {"step": one.step, "time": one.timestamp, **one.metrics} for one in trained
    ]
    points[-1]["sft_test_loss"] = 1.0
    source = data.RunSource(
        run_dir=run_dir.parent / "nowhere",
        cfg=load_old_run(run_dir),
        records=RunRecords(trainer=list(trained)),
        finetune=points,
        actor=[],
        preprocessor=[{"step": 1, "sft_rows": 6, "sft_rows_left_out": 2}],
    )
    assert data.figures(source) == [
        ("loss in nats per token", "2.000 → 0.500"),
        ("held-out loss", "3.000 → 1.000"),
        ("rows imitated (left out)", "6 (2)"),
        ("optimizer steps", "2"),
        ("tokens trained per second", "10"),
        ("training", "2 s"),
    ]
    charts = {chart.title: data.chart_data(chart, source) for chart in data.CHARTS}
    assert charts["Imitation"]["lines"] == [
        {"label": "conversations", "x": [1, 2], "y": [2.0, 0.5]},
        {"label": "held out", "x": [0, 2], "y": [3.0, 1.0]},
    ]
    assert not charts["Lag"]["lines"]


def test_only_the_first_200_rollouts_and_100_tokens_of_a_span_are_checked_to_be_text(text: TokenText) -> None:
    rollout = seen(text, tokens=103)
    sequence = rollout.rollout.sequences[0]

    def with_unknown(*places: int) -> SeenRollout:
        """104 times a token of plain text, but for ``places``. The second span begins at 3."""
        ids = np.full_like(sequence.token_ids, sequence.token_ids[0])
        ids[list(places)] = 60_000
        sequences = (msgspec.structs.replace(sequence, token_ids=ids),)
        return replace(rollout, rollout=msgspec.structs.replace(rollout.rollout, sequences=sequences))

    assert len(sequence.token_ids) == 104
    assert evidence.unreadable_share([with_unknown(102)], text) == pytest.approx(1 / 101)
    assert evidence.unreadable_share([with_unknown(103)], text) == 0.0
    good = with_unknown()
    assert evidence.unreadable_share([*[good] * 199, with_unknown(3)], text) == pytest.approx(1 / 20_200)
    assert evidence.unreadable_share([*[good] * 200, with_unknown(3)], text) == 0.0


def test_lines_and_charts_of_any_run_are_bounded() -> None:
    assert len(data.thinned([float(i % 7) for i in range(100_000)])) <= 1201
    point = {"step": 3, "time": 1.0} | {f"own_{i}": 1.0 for i in range(20)}
    assert len(data.own_charts([point])) == 12
