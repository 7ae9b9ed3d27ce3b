"""Which finished rollouts wait for a weight probe, and which are refused."""

import numpy as np
import pytest

from pipelinerl.actor.publish_gate import REMEMBERED, Misses, PublishGate, newest_used
from pipelinerl.records import Rollout, TrainingSequence


def rollout(*versions: int, servers: dict[str, int] | None = None, attempt: int = 0) -> Rollout:
    """A rollout with a token of each version, of servers with the probes that they had missed before."""
    used = {"s": 0} if servers is None else servers
    spans = [[1 + i, 2 + i, version] for i, version in enumerate(versions)]
    sequence = TrainingSequence(
        token_ids=np.zeros(1 + len(versions), np.int32),
        logprobs=np.zeros(len(versions), np.float32),
        spans=np.array(spans, np.int32).reshape(-1, 3),
        finish_reason="stop",
    )
    return Rollout(
        attempt=attempt,
        reward=1.0,
        sequences=(sequence,),
        metrics={},
        latency_s=0.1,
        num_llm_calls=1,
        servers=tuple(used),
        probes_missed=tuple(used.values()),
    )


def test_newest_version_counts_for_every_server_of_a_rollout() -> None:
    used = newest_used([rollout(3, 5), rollout(4, servers={"t": 0}), rollout(2, servers={"s": 0, "u": 0}), rollout()])
    assert used == {"s": 5, "t": 4, "u": 2}


def test_group_waits_ten_seconds_at_most_for_a_probe() -> None:
    gate = PublishGate()
    gate.follow(serving={"s": 8}, verified={"s": 7}, now=0.0)
    assert [gate.holds({"s": 8}, finished=0.0, now=now) for now in (9.9, 10.1)] == [True, False]


@pytest.mark.parametrize(
    ("versions", "before", "refused"),
    [
        ((2, 3), 0, True),
        ((2,), 0, False),  # older than the first version that may be wrong
        ((3,), 1, False),  # sampled after the weights were sent again
        ((8,), 0, True),
        ((8,), 1, True),  # the second probe missed, too
        ((8,), 2, False),
        ((), 0, False),
    ],
)
def test_rollout_is_refused_if_its_server_missed_the_probe_for_it(versions: tuple, before: int, refused: bool) -> None:
    misses = Misses()
    misses.add("s", since=3)
    misses.add("s", since=7)
    kept, failed = misses.sort([rollout(*versions, servers={"s": before}, attempt=5)])
    assert len(kept) == (not refused)
    assert [(f.attempt, f.reason, f.server) for f in failed] == [(5, "weights", "s")] * refused
    assert misses.counts == {"s": 2}


def test_one_guilty_server_among_several_is_named() -> None:
    misses = Misses()
    assert misses.faulty_server(rollout(4, servers={"r": 0, "s": 0})) is None
    misses.add("s", since=4)
    assert misses.faulty_server(rollout(4, servers={"r": 0, "s": 0})) == "s"
    assert misses.faulty_server(rollout(4, servers={"r": 0})) is None


def test_group_waits_until_every_server_was_verified_with_the_newest_version_it_used() -> None:
    gate = PublishGate()
    serving = {"s": 8, "t": 8}
    for verified, waits in (({"s": 7, "t": 7}, True), ({"s": 8, "t": 7}, True), ({"s": 8, "t": 8}, False)):
        gate.follow(serving=serving, verified=verified, now=1.0)
        assert gate.holds({"s": 8, "t": 8}, finished=1.0, now=1.0) is waits
        assert not gate.holds({"s": 7, "t": 7}, finished=1.0, now=1.0)


def test_version_that_is_not_announced_yet_waits_like_any_other() -> None:
    """A server samples from a version a moment before the trainer can say so."""
    gate = PublishGate()
    gate.follow(serving={"s": 8}, verified={"s": 8}, now=0.0)
    assert gate.holds({"s": 9}, finished=0.0, now=0.0)


def test_nobody_waits_for_a_server_that_is_not_probed_or_has_left() -> None:
    gate = PublishGate()
    gate.follow(serving={"s": 8}, verified={}, now=0.0)
    assert not gate.holds({"s": 8}, finished=0.0, now=0.0)
    gate.follow(serving={"s": 8}, verified={"s": 7}, now=0.0)
    assert gate.holds({"s": 8}, finished=0.0, now=0.0)
    gate.follow(serving={}, verified={}, now=0.0)
    assert not gate.holds({"s": 8}, finished=0.0, now=0.0)


def test_wait_ends_at_the_limit_and_the_next_groups_do_not_wait_for_a_slow_server() -> None:
    gate = PublishGate(wait_s=5.0)

    def waits(now: float, serves: int, verified: int) -> bool:
        gate.follow(serving={"s": serves}, verified={"s": verified}, now=now)
        return gate.holds({"s": serves}, finished=now, now=now)

    assert waits(0.0, 1, 0)
    assert gate.holds({"s": 1}, finished=0.0, now=4.9)
    assert not gate.holds({"s": 1}, finished=0.0, now=5.0)
    assert not waits(6.0, 1, 0)
    assert not waits(12.0, 2, 1)  # its probe took 12 s, so that of the next version is not awaited
    assert not waits(13.0, 2, 2)
    assert waits(20.0, 3, 2)  # the one before was in time


def test_server_that_never_catches_up_costs_one_wait_in_all() -> None:
    gate, waited = PublishGate(wait_s=5.0), 0
    for now in range(1000):
        gate.follow(serving={"s": now}, verified={"s": max(0, now - 8) // 8 * 8}, now=float(now))
        waited += gate.holds({"s": now}, finished=float(now), now=float(now))
    assert waited <= 7


def test_published_rollouts_take_no_memory_each() -> None:
    """One entry per server and version, and of these the newest: a run publishes millions of rollouts."""
    gate = PublishGate()
    for version in range(REMEMBERED + 10):
        gate.published([rollout(version), rollout(version), rollout(version, servers={"t": 0})])
    assert len(gate._published) == REMEMBERED
    newest = REMEMBERED + 9
    assert gate.count_published("s", since=newest - 1) == 4
    assert gate.count_published("t", since=0) == REMEMBERED // 2


def test_published_rollouts_that_a_miss_concerns_are_counted_once() -> None:
    gate = PublishGate()
    gate.published([rollout(2), rollout(2, 3), rollout(4), rollout(4, servers={"t": 0})])
    assert gate.count_published("s", since=3) == 2
    assert gate.count_published("s", since=3) == 0
    assert gate.count_published("s", since=2) == 1
    assert gate.count_published("t", since=0) == 1
