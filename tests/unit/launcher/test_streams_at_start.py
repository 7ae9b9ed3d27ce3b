"""`resume=checkpoint`: streams are set aside with an account of every rollout, whatever their state."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.config import load
from pipelinerl.config.load import RUN_CONFIG, load_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.inspect import ledger
from pipelinerl.launcher import streams_at_start
from pipelinerl.launcher.run_dir import Claim
from pipelinerl.records import MicroBatch, OrderResumed, PreprocessorProgress, SamplesProcessed, TrainerMessage, topics
from pipelinerl.records.order import DataOrder
from pipelinerl.records.rollouts import ActorRecord
from pipelinerl.streams import SingleStreamSpec, open_writer
from pipelinerl.streams.epoch import StreamEpoch, lost_folder, read_epoch, write_epoch
from pipelinerl.world import WorldMap, build_world
from tests.run_folder import ATTEMPTS, GROUPS, Story, make_run
from tests.says import says

BATCH = ATTEMPTS * GROUPS


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", Story(steps=4))


def begin(run: Path) -> str:
    said: list[str] = []
    streams_at_start.begin_epoch(run, load_run(run), said.append)
    return "\n".join(said)


def test_streams_are_set_aside_and_the_ledger_names_what_was_lost(run: Path) -> None:
    groups = ledger.read_ledger(run)
    assert groups.counts() == {"trained": 4 * BATCH}
    assert str(lost_folder(run, 1)) in begin(run)
    assert not (run / "streams").exists()
    assert (lost_folder(run, 1) / "streams" / "actor").is_dir()
    assert read_epoch(run) == StreamEpoch(number=2)
    write_epoch(run, StreamEpoch(number=2, step=3))  # as the trainer does
    book = ledger.read_ledger(run)
    assert book.counts() == {"trained": 3 * BATCH, "lost": BATCH}
    assert {entry.reason for entry in book.entries if entry.outcome == "lost"} == {
        "streams 1 ended with the checkpoint of step 3"
    }


@pytest.mark.parametrize(("trained_again", "violations"), [("0-6/0", 0), ("0-0/0", 1)])
def test_a_sample_of_both_epochs_is_trained_twice(run: Path, trained_again: str, violations: int) -> None:
    begin(run)
    write_epoch(run, StreamEpoch(number=2, step=3))
    with open_writer(SingleStreamSpec(run, topics.ACTOR), ActorRecord) as actor:
        actor.write(OrderResumed(step=3, order=DataOrder(), published=3 * BATCH))
    with open_writer(SingleStreamSpec(run, topics.PREPROCESSOR), PreprocessorProgress) as preprocessor:
        counts = {"samples_packed": 1, "samples_dropped": 0, "dropped_by_reason": {}}
        preprocessor.write(PreprocessorProgress(**counts, step=4, packed_sample_ids=(trained_again,)))
    with open_writer(SingleStreamSpec(run, topics.TRAINER), TrainerMessage) as trainer:
        trainer.write(SamplesProcessed(samples_processed=4 * BATCH, step=4))
    book = ledger.read_ledger(run)
    assert [v for v in book.violations if "in new streams" in v] == [
        f"{trained_again} was trained in step 0 and, in new streams, trained in step 3"
    ] * violations


@pytest.mark.parametrize("damage", ["no streams", "no topic", "garbage"])
def test_streams_that_cannot_be_read_are_no_obstacle(run: Path, damage: str) -> None:
    if damage == "no streams":
        shutil.rmtree(run / "streams")
    elif damage == "no topic":
        shutil.rmtree(run / "streams" / "actor")
    else:
        for path in run.glob("streams/*/*/*/*.log"):
            path.write_bytes(b"garbage" * 100)
    begin(run)
    assert read_epoch(run).number == 2
    assert not (run / "streams").exists()
    assert (lost_folder(run, 1) / "damage.txt").read_text()


def test_evaluations_and_snapshots_are_kept_for_the_new_streams(run: Path) -> None:
    (run / "actor_0").mkdir()
    (run / "actor_0" / "progress.msgpack").write_bytes(b"snapshot")
    begin(run)
    lost = lost_folder(run, 1)
    assert (lost / "actor_0" / "progress.msgpack").read_bytes() == b"snapshot"
    assert not (run / "actor_0" / "progress.msgpack").exists()
    assert (lost / "evaluations.jsonl").read_bytes().count(b"evaluation_done") == 1
    begin(run)
    assert read_epoch(run).number == 3
    assert (lost_folder(run, 2) / "stream_epoch.json").exists()


def config_with(ranks: int, *overrides: str) -> Config:
    required = ["output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b", "world.accelerator=cpu"]
    devices = [f"world.cpu_slots={1 + ranks}", "world.actor_fraction=1", f"world.finetune_fraction={ranks}"]
    return load.parse(load.compose("base", [*required, *devices, *overrides]))


def go_on(run: Path, config: Config) -> None:
    """What a launcher asks before it goes on with the streams of ``run``."""
    streams_at_start.check_packing(run, config, build_world(config, {}))


@pytest.mark.parametrize(
    ("ranks", "shared", "changed"),
    [
        (2, 2, None),
        (
            1,
            1,
            "the trainer's ranks (`world.finetune_fraction`) were 2 and are 1, `finetune.seq_parallel` was 2 and is 1",
        ),
        (4, 2, "the trainer's ranks (`world.finetune_fraction`) were 2 and are 4"),
        (2, 1, "`finetune.seq_parallel` was 2 and is 1"),
    ],
)
def test_streams_packed_for_other_ranks_are_refused(
    run: Path, make_micro_batch: Callable[..., MicroBatch], ranks: int, shared: int, changed: str | None
) -> None:
    """A run that went on with one rank instead of two trained half of each step that lay ready, and said nothing."""
    OmegaConf.update(saved := load.load_run_dictconfig(run), "finetune.seq_parallel", 2)
    OmegaConf.save(saved, run / RUN_CONFIG)
    build_world(config_with(2), {}).save(run)
    with open_writer(SingleStreamSpec(run, topics.TRAINING_DATA), MicroBatch) as writer:
        writer.write(make_micro_batch())
    config = config_with(ranks, f"finetune.seq_parallel={shared}")
    if changed is not None:
        with pytest.raises(ConfigError, match=says(f"{changed}, but micro-batches", "resume=checkpoint")):
            go_on(run, config)
        begin(run)
    go_on(run, config)


def test_ranks_may_change_before_anything_is_packed(run: Path) -> None:
    go_on(run, config_with(2))  # the launch before ended before it had a world
    build_world(config_with(1), {}).save(run)
    shutil.rmtree(run / "streams" / "training_data", ignore_errors=True)
    go_on(run, config_with(2))


@pytest.mark.parametrize("mode", ["servers", "actor", "evaluation"])
def test_ranks_may_change_where_nothing_is_packed(run: Path, mode: str) -> None:
    """The trainer has devices in the world of every mode. With a redis of the run's own nobody can look."""
    build_world(config_with(1), {}).save(run)
    go_on(run, config_with(2, "streams=redis", f"debug.mode={mode}"))


def test_standalone_preprocessor_for_other_ranks_is_told_to_begin_again(
    run: Path, make_micro_batch: Callable[..., MicroBatch]
) -> None:
    """It cannot have resume=checkpoint: only a whole run has checkpoints."""
    build_world(config_with(1), {}).save(run)
    with open_writer(SingleStreamSpec(run, topics.TRAINING_DATA), MicroBatch) as writer:
        writer.write(make_micro_batch())
    with pytest.raises(ConfigError, match=r"with the same, or set force_restart=true$"):
        go_on(run, config_with(2, "debug.mode=preprocessor", "debug.streams_from=/other"))


def test_launcher_refuses_other_ranks_before_it_writes_anything(run: Path) -> None:
    plan: Any = SimpleNamespace(config=config_with(2, "streams=redis"), world=build_world(config_with(2), {}))
    build_world(config_with(1), {}).save(run)
    with (run / "lock").open("w") as lock, pytest.raises(ConfigError, match=r"resume=checkpoint"):
        streams_at_start.take(Claim(path=run, resumed=True, finished=False, lock=lock), plan)
    assert WorldMap.load(run).trainer_world_size == 1
