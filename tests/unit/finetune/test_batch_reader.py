"""Whole optimizer batches in order, each once, from the streams of one or several preprocessors."""

import pytest

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.config.load import compose, parse
from pipelinerl.errors import StreamError
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.updates import last_needed
from pipelinerl.records import MicroBatch
from tests.says import says


class FakeReader:
    """Gives its records two at a time."""

    def __init__(self, records: list[MicroBatch], start: int = 0):
        self.records, self.position, self.committed = records, start, 0

    def poll(self, timeout_s: float) -> list[tuple[int, MicroBatch]]:
        found = list(enumerate(self.records))[self.position : self.position + 2]
        self.position += len(found)
        return found

    def commit(self, offset: int) -> None:
        self.committed = offset

    def close(self) -> None: ...


def records_of(step: int, count: int = 3) -> list[MicroBatch]:
    samples = make_samples(0, count, vocab_size=9, lengths=(3, 4), step=step)
    return pack(samples, [[i] for i in range(count)], step)


def keys(records: list[MicroBatch] | None) -> list[tuple[int, int]] | None:
    return None if records is None else [(r.step, r.index) for r in records]


def test_feed_gives_whole_steps_and_the_position_after_each() -> None:
    reader = FakeReader([*records_of(0), *records_of(1)])
    feed = BatchReader([("0/0", reader)])
    assert keys(feed.next_step(0, 0)) == [(0, 0), (0, 1), (0, 2)]
    assert feed.resume_offsets() == {"0/0": 3}
    assert keys(feed.next_step(1, 0)) == [(1, 0), (1, 1), (1, 2)]
    assert feed.resume_offsets() == {"0/0": 6}


def test_feed_incomplete_step_gives_none_until_it_is_whole() -> None:
    whole = records_of(0)
    reader = FakeReader(whole[:2])
    feed = BatchReader([("0/0", reader)])
    assert feed.next_step(0, 0) is None
    assert feed.resume_offsets() == {"0/0": 0}
    reader.records.append(whole[2])
    assert keys(feed.next_step(0, 0)) == [(0, 0), (0, 1), (0, 2)]


def test_feed_tells_whether_steps_are_there_without_taking_them() -> None:
    reader = FakeReader([*records_of(0), *records_of(1)[:1]])
    feed = BatchReader([("0/0", reader)])
    assert feed.has_steps(0, 0.0)
    assert not feed.has_steps(0, 0.0, last=1)
    assert feed.resume_offsets() == {"0/0": 0}
    assert keys(feed.next_step(0, 0)) == [(0, 0), (0, 1), (0, 2)]
    assert not feed.has_steps(1, 0.0)


def test_feed_passes_over_steps_before_the_one_asked_for_and_duplicates() -> None:
    reader = FakeReader([*records_of(0), *records_of(1, 2)[:1], *records_of(1, 2)])
    assert keys(BatchReader([("0/0", reader)]).next_step(1, 0)) == [(1, 0), (1, 1)]


def test_feed_missing_step_is_an_error() -> None:
    feed = BatchReader([("0/0", FakeReader(records_of(1)))])
    with pytest.raises(StreamError, match=says("step 1", "step 0")):
        feed.next_step(0, 0)


def test_feed_takes_steps_from_preprocessors_in_turn() -> None:
    even, odd = FakeReader([*records_of(0), *records_of(2)]), FakeReader(records_of(1))
    feed = BatchReader([("0/0", even), ("1/0", odd)])
    assert [keys(feed.next_step(step, 0))[0][0] for step in range(3)] == [0, 1, 2]
    assert feed.resume_offsets() == {"0/0": 6, "1/0": 3}
    feed.commit({"0/0": 3, "9/0": 1})
    assert (even.committed, odd.committed) == (3, 0)


def test_feed_put_back_gives_the_same_step_again() -> None:
    feed = BatchReader([("0/0", FakeReader(records_of(0)))])
    first = feed.next_step(0, 0)
    feed.put_back()
    assert keys(feed.next_step(0, 0)) == keys(first)


def test_feed_holds_a_step_back_until_the_whole_phase_is_there() -> None:
    even, odd = FakeReader(records_of(0)), FakeReader([*records_of(1), *records_of(3)[:2]])
    feed = BatchReader([("0/0", even), ("1/0", odd)])
    assert feed.next_step(0, 0, last=3) is None
    even.records.extend(records_of(2))
    assert feed.next_step(0, 0, last=3) is None
    assert feed.resume_offsets() == {"0/0": 0, "1/0": 0}
    odd.records.append(records_of(3)[2])
    assert keys(feed.next_step(0, 0, last=3)) == [(0, 0), (0, 1), (0, 2)]
    assert feed.resume_offsets() == {"0/0": 3, "1/0": 0}
    assert [keys(feed.next_step(step, 0))[0][0] for step in (1, 2, 3)] == [1, 2, 3]
    assert feed.resume_offsets() == {"0/0": 6, "1/0": 6}


@pytest.mark.parametrize(("step", "last"), [(0, 3), (1, 1), (3, 3), (4, 7), (8, 9), (9, 9)])
def test_a_phase_of_the_conventional_schedule_is_trained_when_all_of_it_is_generated(step: int, last: int) -> None:
    phases = ["schedule=conventional", "steps_per_phase=4", "max_lag_steps=3", "finetune.max_train_steps=10"]
    run = ["output_dir=x", "model_path=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    assert last_needed(step, parse(compose("base", run + phases))) == last
    assert last_needed(step, parse(compose("base", run))) == step
