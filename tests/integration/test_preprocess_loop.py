"""The preprocessor's loop on real streams: pacing, drops, and a kill at every single write."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import StreamError
from pipelinerl.inspect.ledger import ledger_of
from pipelinerl.membership.role import RoleContext
from pipelinerl.observability.archive import read_archive
from pipelinerl.observability.status import RoleStatus
from pipelinerl.preprocess import loop
from pipelinerl.preprocess.intake import open_groups
from pipelinerl.preprocess.loop import Preprocessor
from pipelinerl.records import (
    ActorRecord,
    ArchivedStep,
    DataOrder,
    MicroBatch,
    OrderResumed,
    PreprocessorProgress,
    ProblemHistory,
    SamplesProcessed,
    TrainerMessage,
    TrainingResumed,
    topics,
)
from pipelinerl.records.check import check_micro_batch
from pipelinerl.records.order import DomainOrder, EpochOrder
from pipelinerl.streams import SingleStreamSpec, TopicWriter, open_reader, open_writer
from tests.memory_streams import MemoryBackend
from tests.preprocess_kit import (
    DEADLINE_S,
    VOCAB,
    aging_groups,
    consumed,
    make_context,
    make_group,
    make_world,
    prepare_run,
    preprocessor,
    read_topic,
    turn_until,
    write_groups,
)
from tests.says import says


@pytest.fixture(params=["memory", "files"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare_run(MemoryBackend() if request.param == "memory" else request.param, tmp_path, monkeypatch)


def test_one_rank_groups_become_exact_optimizer_batches(run_dir: Path):
    groups = [make_group(np.random.default_rng(i), i, version=0) for i in range(4)]
    write_groups(run_dir, groups)
    with preprocessor(make_context(run_dir, make_world())) as role:
        turn_until(role, consumed(role, 4))
    batches = read_topic(run_dir, topics.TRAINING_DATA, MicroBatch)
    for mb in batches:
        check_micro_batch(mb, vocab_size=VOCAB)
    packed = [[i for mb in batches if mb.step == step for i in mb.sequence_ids] for step in (0, 1)]
    order = [f"0-{position}/{attempt}/0" for position in range(4) for attempt in range(4)]
    assert [sorted(ids) for ids in packed] == [sorted(order[:6]), sorted(order[6:12])]
    assert {mb.num_samples for mb in batches} == {6}
    assert {mb.next_source for mb in batches if mb.step == 0} == {(1, 2)}
    rewards = [r.reward for r in groups[0].rollouts]
    mb = next(mb for mb in batches if "0-0/1/0" in mb.sequence_ids)
    segment = mb.sequence_ids.index("0-0/1/0")
    start = int(mb.segment_lengths[:segment].sum())
    expected = rewards[1] - (sum(rewards) - rewards[1]) / 3
    assert mb.advantages[start + 2] == pytest.approx(expected, rel=1e-6)
    assert mb.segment_weights[segment] == pytest.approx(1 / 6)


def test_drops_are_reported_with_reasons_and_the_ledger_is_closed(run_dir: Path):
    records = aging_groups(30)
    write_groups(run_dir, records)
    with preprocessor(
        make_context(run_dir, make_world(ranks=2), "preprocess.filter_zero_advantage_groups=true", "max_lag_steps=1")
    ) as role:
        turn_until(role, consumed(role, 31))
        in_hand = len(role.cutter.samples)
    progress = read_topic(run_dir, topics.PREPROCESSOR, PreprocessorProgress)
    last = progress[-1]
    assert set(last.dropped_by_reason) == {"malformed", "zero_advantage", "lag"}
    assert last.dropped_by_reason["malformed"] == 4 * sum(position % 9 == 5 for position in range(30))
    assert last.samples_packed + last.samples_dropped + in_hand == 4 * 30
    ledger = ledger_of(records, progress, steps_trained=0)
    assert not ledger.violations
    assert sum(count for name, count in ledger.counts().items() if name != "dropped/timeout") == 120
    for partition in range(2):
        for mb in read_topic(run_dir, topics.TRAINING_DATA, MicroBatch, partition=partition):
            assert (mb.step - mb.spans[:, 2] <= 1).all()
    points = (run_dir / "metrics" / "preprocessor.jsonl").read_text()
    for name in ("survivorship/lag/mean_tokens", "survivorship/lag/mean_reward", "survivorship/trained/count"):
        assert name in points


def test_archive_has_every_rollout_of_the_last_step_with_outcome_and_advantage(run_dir: Path):
    groups = [make_group(np.random.default_rng(i), i, version=0) for i in range(4)]
    refused = msgspec.structs.replace(groups[1].rollouts[0], reward=float("nan"))
    groups[1] = msgspec.structs.replace(groups[1], rollouts=(refused, *groups[1].rollouts[1:]))
    groups = [msgspec.structs.replace(group, problem=f'{{"n": {i}}}') for i, group in enumerate(groups)]
    write_groups(run_dir, groups)
    with preprocessor(
        make_context(run_dir, make_world(), "archive.rollouts_per_step=3", "archive.last_steps=1")
    ) as role:
        turn_until(role, consumed(role, 4))
    steps = {step: records for step, _, records in read_archive(run_dir, "preprocessor", ArchivedStep)}
    assert sorted(steps) == [0, 1]
    newest = [rollout for record in steps[1] for rollout in record.rollouts]
    assert sorted(rollout.sample_id for rollout in newest) == [
        *(f"0-2/{attempt}" for attempt in (2, 3)),
        *(f"0-3/{attempt}" for attempt in range(4)),
    ]
    first = {rollout.sample_id: rollout for record in steps[0] for rollout in record.rollouts}
    assert {name for name, rollout in first.items() if rollout.outcome == "malformed"} == {f"0-1/{i}" for i in range(4)}
    trained = [rollout for rollout in first.values() if rollout.outcome == "trained"]
    assert 3 <= len(trained) <= 4, "three chosen ones, and the longest if it is none of them"
    for rollout in trained:
        source = groups[int(rollout.group_id.split("-")[1])]
        assert rollout.problem == source.problem
        own = rollout.rollout.reward
        rewards = [r.reward for r in source.rollouts]
        assert rollout.advantages[0] == pytest.approx(own - (sum(rewards) - own) / 3, rel=1e-6)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the role runs after it."""


@contextmanager
def kill_at_write(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """The write with this number raises before it reaches the stream."""
    writes = 0
    write = TopicWriter.write

    def counted(self: TopicWriter, record: Any) -> int:
        nonlocal writes
        writes += 1
        if writes > number:
            raise Killed
        return write(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(TopicWriter, "write", counted)
        yield


@pytest.mark.parametrize("run_dir", ["memory"], indirect=True)
def test_killed_at_every_write_data_progress_and_ledger_equal_the_undisturbed_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    records = aging_groups(14)
    world = make_world(ranks=2)
    overrides = ("preprocess.filter_zero_advantage_groups=true", "finetune.seq_length=40")

    ctx = make_context(run_dir, world, *overrides)

    def run(folder: Path) -> tuple[list[Any], list[Any]]:
        with preprocessor(RoleContext(**{**vars(ctx), "run_dir": folder})) as role:
            turn_until(role, consumed(role, 15))
        data = [read_topic(folder, topics.TRAINING_DATA, MicroBatch, partition=p) for p in range(2)]
        return data, read_topic(folder, topics.PREPROCESSOR, PreprocessorProgress)

    def comparable(data: list[Any]) -> list[Any]:
        return [
            [
                (mb.step, mb.index, mb.count, mb.sequence_ids, mb.token_ids.tolist(), mb.advantages.tolist())
                for mb in part
            ]
            for part in data
        ]

    write_groups(run_dir / "undisturbed", records)
    expected, expected_progress = run(run_dir / "undisturbed")
    total = sum(map(len, expected)) + len(expected_progress)
    assert max(mb.count for mb in expected[0]) > 1, "the case must have several micro-batches per rank"
    assert total > 12
    for number in range(total):
        folder = run_dir / f"killed_{number}"
        write_groups(folder, records)
        with kill_at_write(monkeypatch, number), pytest.raises(Killed):
            run(folder)
        data, progress = run(folder)
        assert comparable(data) == comparable(expected), number
        assert progress[-1] == expected_progress[-1], number
        ledger = ledger_of(records, progress, steps_trained=0)
        assert not ledger.violations, number
        assert sorted(ledger.entries, key=str) == sorted(
            ledger_of(records, expected_progress, steps_trained=0).entries, key=str
        )


def test_ready_role_waits_for_its_first_group_without_a_gap(run_dir: Path):
    """It has started when it waits, and its wait lasts from then on, however often the topic is polled."""
    status = RoleStatus(run_dir, "preprocessor_0")
    ctx = dataclasses.replace(make_context(run_dir, make_world()), status=status)
    turns: list[tuple[int, Any]] = []

    def observe(self: Preprocessor) -> None:
        Preprocessor.turn(self)
        turns.append((status.record().progress_count, status.record().waits))
        if len(turns) == 1:
            began.append(status.record().waits[0].since)
        if len(turns) == 3:
            write_groups(run_dir, [make_group(np.random.default_rng(0), 0, version=0)])
        if len(turns) >= 3 and not status.record().waits:
            ctx.stop.set()

    began: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Preprocessor", type("Observed", (Preprocessor,), {"turn": observe}))
        loop.run(ctx)
    assert turns[0][0] == 1
    for _, waits in turns[:3]:
        assert [(wait.what, wait.on) for wait in waits] == [("the next group", "actor_0")]
        assert waits[0].since == pytest.approx(began[0], abs=1e-3)
    assert turns[-1][1] == ()
    status.close()


def test_no_more_than_max_ready_steps_ahead_of_the_trainer(run_dir: Path):
    """Batches of 6 from 40 rollouts: with 2 ready steps and nothing trained, steps 0 to 2 are published; then 3."""
    write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(10)])
    ctx = make_context(run_dir, make_world(), "preprocess.max_ready_steps=2", "max_lag_steps=null")

    def published() -> list[int]:
        return sorted({mb.step for mb in read_topic(run_dir, topics.TRAINING_DATA, MicroBatch)})

    with preprocessor(ctx) as role:
        thread = threading.Thread(target=lambda: turn_until(role, lambda: ctx.stop.is_set()))
        thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while published() != [0, 1, 2]:
            assert time.monotonic() < deadline, published()
        assert not ctx.stop.wait(0.3)
        assert published() == [0, 1, 2]
        with open_writer(SingleStreamSpec(run_dir, topics.TRAINER), TrainerMessage) as trainer:
            trainer.write(SamplesProcessed(samples_processed=6, step=1))
            while published() != [0, 1, 2, 3]:
                assert time.monotonic() < deadline, published()
        ctx.stop.set()
        thread.join(timeout=DEADLINE_S)
        assert not thread.is_alive()


def test_two_replicas_pack_the_steps_in_turn(run_dir: Path):
    world = make_world(replicas=2)
    for replica in range(2):
        write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(5)], replica)
        with preprocessor(make_context(run_dir, world, "max_lag_steps=null", replica=replica)) as role:
            turn_until(role, consumed(role, 5))
    steps = [
        sorted({mb.step for mb in read_topic(run_dir, topics.TRAINING_DATA, MicroBatch, instance=replica)})
        for replica in range(2)
    ]
    assert steps == [[0, 2, 4], [1, 3, 5]]


def test_sequence_parallel_ranks_get_the_same_micro_batches(run_dir: Path):
    write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(3)])
    with preprocessor(make_context(run_dir, make_world(ranks=4), "finetune.seq_parallel=2")) as role:
        turn_until(role, consumed(role, 3))
    ids = [
        [mb.sequence_ids for mb in read_topic(run_dir, topics.TRAINING_DATA, MicroBatch, partition=p)] for p in range(4)
    ]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_without_packing_train_batch_size_is_the_micro_batch(run_dir: Path):
    write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(3)])
    overrides = (
        "finetune.seq_packing=false",
        "finetune.train_batch_size=3",
        "finetune.gradient_accumulation_passes=2",
    )
    with preprocessor(make_context(run_dir, make_world(), *overrides)) as role:
        turn_until(role, consumed(role, 3))
    batches = read_topic(run_dir, topics.TRAINING_DATA, MicroBatch)
    assert [(mb.step, mb.count, len(mb.sequence_ids)) for mb in batches] == [(0, 2, 3), (0, 2, 3), (1, 2, 3), (1, 2, 3)]


def test_consumed_groups_may_be_deleted_once_their_batch_is_published(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "COMMIT_EVERY_S", 0.0)
    write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(7)])
    with preprocessor(make_context(run_dir, make_world(), "max_lag_steps=null")) as role:
        turn_until(role, consumed(role, 7))
        source = role.totals.source
    assert source == (5, 4)
    with open_reader(SingleStreamSpec(run_dir, topics.ACTOR), ActorRecord, name="preprocessor_0") as reader:
        assert reader.position == 5


@pytest.mark.parametrize("run_dir", ["memory"], indirect=True)
def test_lost_training_data_is_an_error_not_a_gap(run_dir: Path):
    with open_writer(SingleStreamSpec(run_dir, topics.PREPROCESSOR), PreprocessorProgress) as writer:
        writer.write(PreprocessorProgress(samples_packed=6, samples_dropped=0, dropped_by_reason={}, step=1))
    with pytest.raises(StreamError, match=says("step -1", "step 0")):
        Preprocessor(make_context(run_dir, make_world()))


def test_new_streams_go_on_with_the_step_and_order_of_the_checkpoint(run_dir: Path) -> None:
    rng = np.random.default_rng(0)
    tried = {0: ProblemHistory(groups=2, success=0.25, spread=0.5, version=3)}
    epoch = {0: EpochOrder(size=20, settled=((0, 6),))}
    order = DataOrder(domains={"d": DomainOrder(samples=24, epochs=epoch, history=tried)})
    groups = [
        msgspec.structs.replace(make_group(rng, i, version=4), epoch_size=20, problem_index=i) for i in range(6, 12)
    ]
    write_groups(run_dir, [OrderResumed(step=4, order=order, published=24), *groups])
    with open_writer(SingleStreamSpec(run_dir, topics.TRAINER), TrainerMessage) as trainer:
        trainer.write(TrainingResumed(step=4, repeated=0, samples_processed=24))
    ctx = make_context(run_dir, make_world(), "actor.sampler=my.sampler")
    for until in (5, 7):  # killed in between
        with preprocessor(ctx) as role:
            turn_until(role, lambda role=role, until=until: role.totals.step >= until)
    batches = [b for b in read_topic(run_dir, topics.TRAINING_DATA, MicroBatch) if b.index == 0]
    assert [batch.step for batch in batches] == [4, 5, 6, 7][: len(batches)]
    assert batches[0].order is not None
    assert batches[0].order.domains["d"].samples == 30
    assert batches[0].order.domains["d"].epochs[0].settled == ((0, 8),), "a group that is begun counts as resolved"
    assert batches[2].order is not None
    assert batches[2].order.domains["d"].epochs[0].settled == ((0, 11),)
    history = batches[2].order.domains["d"].history
    assert history[0] == tried[0]
    assert {index: problem.groups for index, problem in history.items()} == {0: 2} | dict.fromkeys(range(6, 11), 1)


@pytest.mark.parametrize("run_dir", ["memory"], indirect=True)
def test_group_that_is_trained_in_part_is_in_the_history_once(run_dir: Path) -> None:
    """The first batch ends within the second group, and the preprocessor restarts there."""
    rng = np.random.default_rng(0)
    write_groups(run_dir, [msgspec.structs.replace(make_group(rng, i, version=4), problem_index=i) for i in range(3)])
    ctx, order = make_context(run_dir, make_world(), "actor.sampler=my.sampler"), DataOrder()
    for begin, end in (((0, 0), (1, 2)), ((1, 2), (3, 0))):
        groups = open_groups(ctx, begin, order)
        groups.poll(0)
        order = groups.resolve_before(end, ["d"] * 6)
        groups.close()
    assert {index: problem.groups for index, problem in order.domains["d"].history.items()} == {0: 1, 1: 1, 2: 1}
