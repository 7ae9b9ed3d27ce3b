"""Finished groups with samples of unverified weights wait, and those of servers that missed are made again."""

import math
import re
import time
from collections import Counter
from itertools import count

import pytest

from pipelinerl.actor.messages import Failure, GroupFinished, StartGroup
from pipelinerl.observability.catalogue import ActorMetric
from pipelinerl.records import GroupDropped, RolloutGroup
from pipelinerl.records.drops import DropReason
from tests.actor_stage import ATTEMPTS, Stage, declared, finished, missed_probe, rollout, sampled_by, servers_of
from tests.says import says


def test_group_waits_for_the_probe_of_its_server_and_verified_ones_overtake_it() -> None:
    """Of two servers that take turns, one was verified with version 1."""
    turn = iter("st" * 1000)
    stage = Stage(lambda start: sampled_by(start, next(turn), 1))
    stage.trainer.version, stage.trainer.servers, stage.trainer.verified = 1, ("s", "t"), {"s": 0, "t": 1}
    stage.until(lambda: len(stage.records) >= 5)
    assert set(servers_of(stage.records)) == {"t"}
    assert stage.training.awaits_check
    waiting = stage.training.numbers()[ActorMetric.GROUPS_HELD]
    assert waiting >= 4
    stage.trainer.verified = {"s": 1, "t": 1}
    stage.until(lambda: servers_of(stage.records).count("s") >= waiting)
    assert [r.dispatch_index for r in stage.records if servers_of([r]) == ["s"]][:3] == [0, 2, 4]


def test_every_held_group_is_looked_at_once_in_a_turn_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 groups wait for a probe, which half of them then get. Before, each publication looked at all that wait."""
    turn, asked = iter("st" * 1000), count()
    stage = Stage(lambda start: sampled_by(start, next(turn), 1), batch=600 * ATTEMPTS)
    stage.trainer.version, stage.trainer.servers, stage.trainer.verified = 1, ("s", "t"), {"s": 0, "t": 0}
    stage.until(lambda: stage.training.numbers()[ActorMetric.GROUPS_HELD] == 1200)
    gate = stage.training._table.gate
    gate.follow(serving={"s": 1, "t": 1}, verified={"s": 0, "t": 1}, now=time.monotonic())
    holds = gate.holds
    monkeypatch.setattr(gate, "holds", lambda *args, **kwargs: (next(asked), holds(*args, **kwargs))[1])
    assert stage.training.publish_in_turn()
    assert next(asked) == 1200
    assert servers_of(stage.records) == ["t"] * 600
    assert stage.training.numbers()[ActorMetric.GROUPS_HELD] == 600


def test_no_slot_counts_as_held_that_the_bound_has_no_room_for() -> None:
    """8 slots, batches of 2, a lag of 1: 4 rollouts may start, and all of them run."""
    stage = Stage(lambda start: None, batch=ATTEMPTS, max_lag_steps=1)
    stage.until(lambda: len(stage.workers.started) == 2)
    assert stage.training.share_held(0) == 0
    assert stage.training._table.share_free(math.inf) == 0.5


def test_share_held_is_of_the_slots_that_untrained_samples_keep_empty() -> None:
    """8 slots, batches of 2, a lag of 3: of 8 rollouts 6 are published and wait for the trainer, and 2 run."""
    plays = iter([True] * 3)
    stage = Stage(lambda start: finished(start) if next(plays, False) else None, batch=ATTEMPTS, max_lag_steps=3)
    stage.until(lambda: len(stage.records) == 3 and len(stage.workers.started) == 4)
    assert stage.training.share_held(0) == pytest.approx(1 - 2 / 6)
    assert stage.training.share_held(1) == 0, "another group may start"


def test_no_more_rollouts_start_than_a_batch_has_texts_before_one_says_how_many_it_has() -> None:
    """Batches of 4, a lag of 1: 8 rollouts of a text each may be under way, but these may have a hundred."""
    stage = Stage(lambda start: None, batch=2 * ATTEMPTS, max_lag_steps=1, unit="texts")
    stage.until(lambda: len(stage.workers.started) == 2)
    first = stage.workers.started[0]
    stage.workers.answer = lambda start: finished(start) if start == first else None
    stage.workers.waiting.append(first)
    stage.until(lambda: len(stage.workers.started) == 4)
    assert len(stage.records) == 1


def test_no_group_waits_where_no_server_is_probed() -> None:
    stage = Stage(lambda start: sampled_by(start, "s", 7))

    def nothing_is_held() -> bool:
        assert not stage.training.holds_groups
        return len(stage.records) >= 50

    stage.until(nothing_is_held)
    assert servers_of(stage.records[:50]) == ["s"] * 50


def test_held_rollouts_of_a_server_that_misses_are_made_again_and_counted() -> None:
    turn = iter("st" * 1000)
    stage = Stage(lambda start: sampled_by(start, next(turn), 1), batch=6)
    stage.trainer.version, stage.trainer.servers, stage.trainer.verified = 1, ("s", "t"), {"s": 0, "t": 1}
    stage.until(lambda: len(stage.records) == 3)
    assert stage.training.numbers()[ActorMetric.GROUPS_HELD] == 3
    stage.workers.answer = lambda start: sampled_by(start, "t", 1)
    stage.trainer.misses, stage.trainer.servers, stage.trainer.verified = [missed_probe("s", 1)], ("t",), {"t": 1}
    stage.until(lambda: len(stage.records) == 6)
    assert servers_of(stage.records) == ["t"] * 6
    assert sorted(record.dispatch_index for record in stage.records) == list(range(6))
    assert [record.refused for record in stage.records] == [{}] * 3 + [{"s": ATTEMPTS}] * 3
    last = declared(stage.metrics[-1])
    assert (last["refused/s"], last["failures/weights"]) == (3 * ATTEMPTS, 3 * ATTEMPTS)


def test_what_a_server_sampled_before_its_miss_is_refused_and_what_it_samples_later_is_not() -> None:
    """Two attempts end as the miss is told, one of them by the weights that were sent again; the first is repeated."""
    stage = Stage(lambda start: None)
    stage.trainer.version, stage.trainer.verified = 1, {"s": 0}
    stage.until(lambda: len(stage.workers.running) == 4)
    stage.trainer.misses, stage.trainer.verified = [missed_probe("s", 1)], {"s": 1}

    def answer(start: StartGroup) -> GroupFinished:
        missed = 0 if len(start.attempts) == ATTEMPTS else 1
        rollouts = tuple(rollout(i, 1, servers={"s": max(missed, i)}) for i in start.attempts)
        return GroupFinished(task_id=start.task_id, rollouts=rollouts, failures=())

    stage.workers.answer = answer
    stage.workers.waiting.extend(stage.workers.running.values())
    stage.until(lambda: len(stage.records) >= 4)
    first = stage.records[0]
    assert isinstance(first, RolloutGroup)
    assert (first.refused, [r.probes_missed for r in first.rollouts]) == ({"s": 1}, [(1,), (1,)])
    assert [start.attempts for start in stage.workers.started if start.group_id == first.group_id] == [(0, 1), (0,)]


def test_group_whose_servers_miss_again_and_again_is_dropped_with_that_reason() -> None:
    stage = Stage(lambda start: sampled_by(start, "s", 1))
    stage.trainer.misses = [missed_probe("s", 1)]
    stage.until(lambda: len(stage.records) >= 1)
    dropped = stage.records[0]
    assert isinstance(dropped, GroupDropped)
    assert (dropped.reason, dropped.refused) == ("weights", {"s": 2 * ATTEMPTS})
    assert re.search(says("s", "weight probe", "version 1"), dropped.detail)


def test_attempt_of_a_group_that_is_being_completed_is_refused_and_repeated_too() -> None:
    """One attempt has ended, the other is tried again on another server, and then the first one's server misses."""
    stage = Stage(lambda start: None, batch=1, max_reissues=3)
    stage.trainer.version, stage.trainer.servers, stage.trainer.verified = 1, ("s", "t"), {"s": 0, "t": 1}
    stage.until(lambda: len(stage.workers.running) == 1)
    (start,) = stage.workers.running.values()

    def lose_one(start: StartGroup) -> GroupFinished | None:
        if len(start.attempts) < ATTEMPTS:
            return None
        failure = Failure(attempt=1, reason=DropReason.TIMEOUT, detail="late")
        done = rollout(0, 1, servers={"s": 0})
        return GroupFinished(task_id=start.task_id, rollouts=(done,), failures=(failure,))

    stage.workers.answer = lose_one
    stage.workers.waiting.append(start)
    stage.until(lambda: [one.attempts for one in stage.workers.running.values()] == [(1,)])
    stage.trainer.misses, stage.trainer.servers, stage.trainer.verified = [missed_probe("s", 1)], ("t",), {"t": 1}
    stage.workers.answer = lambda start: sampled_by(start, "t", 1)
    stage.workers.waiting.extend(stage.workers.running.values())
    stage.until(lambda: len(stage.records) == 1)
    (group,) = stage.records
    assert isinstance(group, RolloutGroup)
    assert [(member.attempt, member.servers) for member in group.rollouts] == [(0, ("t",)), (1, ("t",))]
    assert group.refused == {"s": 1}


def test_slow_probe_delays_a_group_for_ten_seconds_and_no_group_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr("time.monotonic", lambda: next(clock) / 1000)
    finished_at: list[float] = []
    waits: list[float] = []

    def answer(start: StartGroup) -> GroupFinished:
        finished_at.append(next(clock) / 1000)
        return sampled_by(start, "s", 1)

    stage = Stage(answer, batch=100)
    stage.trainer.version, stage.trainer.verified = 1, {"s": 0}
    publish = stage.publish

    def note(record: RolloutGroup | GroupDropped) -> None:
        waits.append(next(clock) / 1000 - finished_at[record.dispatch_index])
        publish(record)

    stage.publish = note  # type: ignore[method-assign]
    stage.until(lambda: len(stage.records) >= 1)
    assert 10.0 <= waits[0] < 10.1
    stage.until(lambda: len(stage.records) == 100)
    assert max(waits) < 10.1
    stage.workers.answer = lambda start: sampled_by(start, "s", 2)
    stage.trainer.version, stage.trainer.verified = 2, {"s": 1}
    finished_at += [next(clock) / 1000] * 50
    stage.until(lambda: len(stage.records) == 150)
    assert max(waits[100:]) < 1.0
    assert not stage.training.awaits_check


def test_server_that_left_before_its_probe_ended_holds_up_no_group() -> None:
    stage = Stage(lambda start: sampled_by(start, "s", 1), batch=8)
    stage.trainer.version, stage.trainer.verified = 1, {"s": 0}
    stage.until(lambda: stage.training.numbers()[ActorMetric.GROUPS_HELD] == 4)
    stage.trainer.servers, stage.trainer.verified = (), {}
    stage.until(lambda: len(stage.records) == 4)


def test_one_liar_among_64_servers_loses_its_samples_and_nobody_else_does() -> None:
    names = [f"actor_llm_{i}" for i in range(64)]
    liar = names[17]
    turn, misses = iter(names * 100), Counter[str]()
    stage = Stage(lambda start: sampled_by(start, name := next(turn), 3, misses[name]), batch=256)
    stage.trainer.version, stage.trainer.servers = 3, tuple(names)
    stage.trainer.verified = dict.fromkeys(names, 3) | {liar: 2}
    stage.until(lambda: len(stage.records) >= 500)
    assert liar not in servers_of(stage.records)
    held = stage.training.numbers()[ActorMetric.GROUPS_HELD]
    assert held >= 500 // 64
    misses[liar] = 1
    stage.trainer.misses, stage.trainer.verified = [missed_probe(liar, 3)], dict.fromkeys(names, 3)
    stage.until(lambda: len(stage.records) == 512)
    assert sorted(record.dispatch_index for record in stage.records) == list(range(512))
    assert all(record.rollouts[0].probes_missed == (1,) for record in stage.records if servers_of([record]) == [liar])
    assert sum((Counter(record.refused) for record in stage.records), Counter()) == {liar: held * ATTEMPTS}


def test_rollouts_that_were_published_before_the_miss_are_counted() -> None:
    stage = Stage(lambda start: sampled_by(start, "s", 5), batch=6)
    stage.trainer.version = 5
    stage.until(lambda: len(stage.records) == 18)
    stage.trainer.misses = [missed_probe("s", 5)]
    stage.loop._refresh()
    assert stage.loop._metrics.snapshot(1.0)[ActorMetric.PUBLISHED_BEFORE_MISS.of(server="s")] == 18 * ATTEMPTS
