"""Optimizer batches: exact size, oldest first, lag as a hard bound, and the same again after a restart anywhere."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.preprocess.batching import BatchCutter, OptimizerBatch
from pipelinerl.preprocess.samples import Sample
from pipelinerl.preprocess.totals import Totals, next_own_step
from pipelinerl.records import DataOrder
from pipelinerl.records.drops import DropReason


def sample(
    number: int, *, oldest: int = 0, newest: int | None = None, reason: str | None = None, size: int = 1
) -> Sample:
    return Sample(
        sample_id=f"0-{number // 4}/{number % 4}",
        group_id=f"0-{number // 4}",
        domain="d",
        source=(number // 4, number % 4),
        reward=1.0,
        oldest_version=oldest,
        newest_version=oldest if newest is None else newest,
        drop_reason=DropReason.of(reason or ""),
        size=size,
    )


def test_cutter_fills_batches_of_exactly_batch_size_oldest_first():
    cutter = BatchCutter(step=0, batch_size=3, max_lag_steps=None)
    batches = []
    for number in range(7):
        assert cutter.offer(sample(number)) is None
        if batch := cutter.next_batch():
            batches.append(batch)
    assert [[s.sample_id for s in b.samples] for b in batches] == [
        ["0-0/0", "0-0/1", "0-0/2"],
        ["0-0/3", "0-1/0", "0-1/1"],
    ]
    assert [(b.step, b.next_source) for b in batches] == [(0, (0, 3)), (1, (1, 2))]
    assert len(cutter.samples) == 1


def test_batch_of_texts_ends_with_the_rollout_that_fills_it_and_its_excess_makes_room():
    """Batches of 5 texts from rollouts of 3, 1, 4 | 2, 2, 6: 8 and 10 texts, 3 and 5 of them beyond the size."""
    cutter, totals = BatchCutter(step=0, batch_size=5, max_lag_steps=None), Totals()
    batches = []
    for number, size in enumerate((3, 1, 4, 2, 2, 6, 1)):
        current = sample(number, size=size, reason="too_long" if number == 6 else None)
        totals.decided(current, cutter.offer(current))
        if batch := cutter.next_batch():
            batches.append(batch)
            totals.published(batch, DataOrder())
    assert [([s.size for s in b.samples], b.excess) for b in batches] == [([3, 1, 4], 3), ([2, 2, 6], 5)]
    record = totals.to_record()
    assert (record.room, record.samples_dropped, record.samples_packed) == (3 + 5 + 1, 1, 6)
    assert Totals.restore(record).room == 9


@pytest.mark.parametrize(("rollouts", "conversations", "size"), [(2, 3, 2), (2, 0, 2), (0, 3, 3)])
def test_batch_size_counts_conversations_only_where_there_are_no_rollouts(rollouts, conversations, size):
    imitated = [replace(sample(n), token_weights=(np.ones(1, np.float32),)) for n in range(conversations)]
    samples = (*imitated, *map(sample, range(rollouts)))
    assert OptimizerBatch(step=0, samples=samples, next_source=(0, 0)).size == size


@pytest.mark.parametrize(("bound", "dropped"), [(0, 5), (1, 4), (2, 3), (5, 0), (None, 0)])
def test_cutter_drops_exactly_the_samples_beyond_the_lag_bound(bound, dropped):
    """Step 5, oldest versions 0 … 5: the lag is 5 − version."""
    cutter = BatchCutter(step=5, batch_size=100, max_lag_steps=bound)
    reasons = [cutter.offer(sample(i, oldest=i)) for i in range(6)]
    assert reasons.count("lag") == dropped
    assert len(cutter.samples) == 6 - dropped


def test_cutter_lag_counts_the_oldest_token_of_a_rollout_across_versions():
    cutter = BatchCutter(step=4, batch_size=10, max_lag_steps=2)
    assert cutter.offer(sample(0, oldest=1, newest=4)) == "lag"
    assert cutter.offer(sample(1, oldest=2, newest=4)) is None


def test_cutter_version_that_does_not_exist_yet_is_invalid():
    assert BatchCutter(step=4, batch_size=10, max_lag_steps=None).offer(sample(0, oldest=5)) == "future_version"


def test_cutter_reason_of_the_group_wins():
    cutter = BatchCutter(step=9, batch_size=10, max_lag_steps=0)
    assert cutter.offer(sample(0, oldest=0, reason="zero_advantage")) == "zero_advantage"


@pytest.mark.parametrize(
    ("step", "replica", "replicas", "expected"), [(0, 0, 1, 0), (7, 0, 1, 7), (0, 2, 3, 2), (3, 2, 3, 5), (6, 0, 3, 6)]
)
def test_next_own_step_takes_turns(step, replica, replicas, expected):
    assert next_own_step(step, replica, replicas) == expected


class Replayed:
    """A preprocessor without streams that may be killed at any event; `log` are the progress records."""

    def __init__(self, samples: list[Sample], batch_size: int, bound: int | None):
        self.samples, self.batch_size, self.bound = samples, batch_size, bound
        self.log, self.batches = [], {}

    def run(self, die_after: int) -> bool:
        """Handles samples from where the log says; True when it came to the end."""
        totals = Totals.restore(self.log[-1] if self.log else None)
        cutter = BatchCutter(step=totals.step, batch_size=self.batch_size, max_lag_steps=self.bound)
        for event, current in enumerate(s for s in self.samples if s.source >= totals.source):
            if event == die_after:
                return False
            totals.decided(current, cutter.offer(current))
            if batch := cutter.next_batch():
                ids = [s.sample_id for s in batch.samples]
                assert self.batches.setdefault(batch.step, ids) == ids, "a replayed batch differs"
                if die_after % 3 == 0 and event == die_after - 1:
                    return False
                totals.published(batch, DataOrder())
                self.log.append(totals.to_record(ids))
            elif totals.pending and event % 2:
                self.log.append(totals.to_record())
        if totals.pending:
            self.log.append(totals.to_record())
        return True


@given(
    seed=st.integers(0, 10_000),
    batch_size=st.integers(1, 7),
    bound=st.sampled_from([None, 0, 1, 3]),
    deaths=st.lists(st.integers(1, 40), max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_killed_anywhere_batches_drops_and_totals_equal_the_undisturbed_run(seed, batch_size, bound, deaths):
    rng = random.Random(seed)
    samples = [
        sample(i, oldest=max(0, i // batch_size - rng.randrange(6)), reason=rng.choice([None] * 4 + ["zero_advantage"]))
        for i in range(60)
    ]
    undisturbed, killed = Replayed(samples, batch_size, bound), Replayed(samples, batch_size, bound)
    assert undisturbed.run(die_after=10_000)
    for death in deaths:
        killed.run(die_after=death)
    assert killed.run(die_after=10_001)
    assert killed.batches == undisturbed.batches

    def events(log):
        return (
            [i for record in log for i in record.packed_sample_ids],
            [pair for record in log for pair in record.dropped_sample_ids],
        )

    assert events(killed.log) == events(undisturbed.log)
    if undisturbed.log:
        last, expected = killed.log[-1], undisturbed.log[-1]
        assert last.samples_packed == expected.samples_packed == len(events(killed.log)[0])
        assert last.dropped_by_reason == expected.dropped_by_reason
        assert last.samples_dropped == len(events(killed.log)[1])
