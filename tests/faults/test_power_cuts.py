"""Power cuts at any moment of a run: each state is opened by the roles' own recovery, and training goes on to its end.

Actor's journal, preprocessor and trainer's checkpoints run in one process with real streams in small segments.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl import state
from pipelinerl.actor.problems import ProblemSource
from pipelinerl.actor.progress import ActorProgress, TopicJournal
from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.checkpoints import Counters, newest_whole
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rendezvous import Peers
from pipelinerl.membership.role import RoleContext
from pipelinerl.preprocess import intake, loop
from pipelinerl.records import ActorRecord, MicroBatch, SamplesProcessed, TrainerMessage, topics
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer, set_streams_backend
from pipelinerl.streams.files import FilesAppender, FilesBackend, FilesCursor
from tests.power_cut import Disk, recording
from tests.preprocess_kit import VOCAB, make_context, make_group, make_world, preprocessor

STEPS, BATCH, PROBLEMS, SAVE_EVERY = 10, 6, 40, 3
MAX_TURNS = 1000
"""Far more than ten steps take; a state that cannot be continued is one problem, not a hang."""
ALONE = Peers(0, 1)
LATEST_S = 1500


@cache
def some_context() -> RoleContext:
    """Composing a configuration takes longer than the rest of a recovery."""
    return make_context(Path("/nowhere"), make_world())


def context_in(run_dir: Path) -> RoleContext:
    cfg = some_context().cfg.model_copy(update={"output_dir": str(run_dir), "model_path": str(run_dir / "model")})
    return replace(some_context(), run_dir=run_dir, cfg=cfg)


class SmallRun:
    """All that keeps state in a run folder, turn by turn; opening it is the recovery."""

    def __init__(self, run_dir: Path, seed: int, disk: Disk | None = None):
        self.run_dir, self.disk = run_dir, disk
        self.rng = np.random.default_rng(seed)
        self.trained: list[list[str]] = []

    def run(self) -> list[list[str]]:
        """Trains up to STEPS; returns the samples of every step made here."""
        found = newest_whole(ALONE, self.run_dir / "checkpoints")
        self.counters = found[1] if found else Counters()
        spec, replica = SingleStreamSpec(self.run_dir, topics.ACTOR), context_in(self.run_dir)
        data = SingleStreamSpec(self.run_dir, topics.TRAINING_DATA)
        source = ProblemSource(num_problems=PROBLEMS, seed=1, name="d")
        self.progress = ActorProgress({"d": source}, None)
        with (
            open_writer(spec, ActorRecord) as groups,
            open_reader(spec, ActorRecord, name="actor_0") as cursor,
            open_writer(SingleStreamSpec(self.run_dir, topics.TRAINER), TrainerMessage) as trainer_topic,
        ):
            self.journal = TopicJournal(self.run_dir / "actor_0", groups, cursor, self.progress)
            self.journal.replay()
            start = self.counters.positions.get("0/0", 0)
            feed = BatchReader([("0/0", open_reader(data, MicroBatch, name="finetune_0", start=start))])
            with preprocessor(replica) as packer:
                for _ in range(MAX_TURNS):
                    if self.counters.step == STEPS:
                        break
                    self._publish()
                    packer.turn()
                    while self.counters.step < STEPS and (batch := feed.next_step(self.counters.step, 0.0)):
                        self._train(batch, feed)
                        samples = self.counters.samples_processed
                        trainer_topic.write(SamplesProcessed(samples_processed=samples, step=self.counters.step))
            feed.close()
        return self.trained

    def _publish(self) -> None:
        place = self.progress.sources["d"].next_problem()
        if self.progress.epoch_began or self.progress.published % 5 == 0:
            self.journal.save()
        index = self.progress.dispatch(4)
        group = make_group(self.rng, place.position, version=max(0, self.counters.step - 1))
        fields = {name: getattr(group, name) for name in group.__struct_fields__}
        mine = {"group_id": f"{place.epoch}-{place.position}", "epoch": place.epoch, "dispatch_index": index}
        size = self.progress.sources["d"].size_of(place.epoch)
        self.journal.publish(type(group)(**(fields | mine | {"epoch_size": size})))

    def _train(self, batch: list[MicroBatch], feed: BatchReader) -> None:
        names = {name.rpartition("/")[0] for mb in batch for name in mb.sequence_ids if name != "sentinel"}
        self.trained.append(sorted(names))
        self.counters = self.counters.after(batch[0], feed.resume_offsets(), 0)
        if self.disk is not None:
            self.disk.trained = self.counters.step
        if self.counters.step % SAVE_EVERY == 0:
            feed.sync()
            state = {"w.param": Piece(torch.full((8,), float(self.counters.step)), 0, 8)}
            checkpoints.write(ALONE, self.run_dir / "checkpoints", state, self.counters)
            feed.commit(self.counters.positions)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "COMMIT_EVERY_S", 0.0)
    monkeypatch.setattr(intake, "IDLE_POLL_S", 0.0)
    monkeypatch.setattr(intake, "BUSY_POLL_S", 0.0)
    monkeypatch.setattr(state, "_POLL_S", 0.01)
    backend = FilesBackend()
    backend._segment_bytes = 3000
    set_streams_backend(backend)


def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Disk, list[list[str]]]:
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text(f'{{"vocab_size": {VOCAB}}}')
    with recording(root, monkeypatch) as disk:
        trained = SmallRun(root, 0, disk).run()
    return disk, trained


def check_cuts(tmp_path: Path, disk: Disk, trained: list[list[str]], count: int) -> Iterator[str]:
    """What goes wrong in ``count`` states, spread over all events; the first of every three loses all unsynced data."""
    for number in range(count):
        cut = disk.cuts[number * len(disk.cuts) // count]
        folder = tmp_path / f"cut{number}"
        cut.rebuild(folder, None if number % 3 == 0 else number)
        try:
            yield from (f"{number} {cut.event}: {p}" for p in resumed(folder, trained, cut.trained, number))
        except Exception as error:
            yield f"{number} {cut.event}: {type(error).__name__}: {error}"


def resumed(folder: Path, trained: list[list[str]], reached: int, seed: int) -> list[str]:
    """Opens a state, trains on to the end; what must not be."""
    run = SmallRun(folder, 1000 + seed)
    later = run.run()
    first = STEPS - len(later)
    problems = [] if first > reached - 1 - 2 * SAVE_EVERY else [f"step {reached} was made, and it resumes from {first}"]
    names = [name for step in trained[:first] + later for name in step]
    if len(set(names)) != len(names) or len(names) != STEPS * BATCH:
        problems.append(f"{len(names)} samples trained, {len(set(names))} different, of {STEPS * BATCH}")
    return problems


def test_a_power_cut_at_any_moment_repeats_unsynced_work_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, trained = recorded(tmp_path / "run", monkeypatch)
    assert len(trained) == STEPS
    assert len(disk.cuts) > 100
    assert list(check_cuts(tmp_path, disk, trained, 12)) == []


@pytest.mark.slow
@pytest.mark.timeout(LATEST_S)
def test_two_hundred_power_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, trained = recorded(tmp_path / "run", monkeypatch)
    problems = list(check_cuts(tmp_path, disk, trained, 200))
    print(f"events {len(disk.cuts)}, states 200, problems {len(problems)}")
    assert problems == []


@pytest.mark.parametrize(("owner", "name"), [(FilesCursor, "sync"), (FilesAppender, "sync")])
def test_a_sync_that_is_left_out_is_found(owner: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as planted:
        planted.setattr(owner, name, lambda _: None)
        disk, trained = recorded(tmp_path / "run", monkeypatch)
    assert next(check_cuts(tmp_path, disk, trained, 60), None) is not None
