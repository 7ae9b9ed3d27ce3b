"""The order in which checks get workers, played with a clock of its own: a check is its arrival and its cost."""

import heapq
import math
from random import Random

import pytest

from pipelinerl.domains.verifier.pool import SLICES_S, Lanes

FOREVER = math.inf
TIMEOUT_S = 5.0


def play(workers: int, checks: list[tuple[float, float]]) -> list[float]:
    """Plays ``checks`` of (arrival, cost) in seconds. Returns when each has its verdict."""
    lanes: Lanes[int] = Lanes(workers=workers, timeout_s=TIMEOUT_S)
    last = len(lanes.limits_s) - 1
    verdicts = [math.nan] * len(checks)
    events = [(arrival, order, -1) for order, (arrival, _) in enumerate(checks)]  # time, check, lane that ends
    heapq.heapify(events)
    idle = workers
    while events:
        now, check, lane = heapq.heappop(events)
        if lane < 0:
            lanes.wait(0, check)
        else:
            lanes.end(lane)
            idle += 1
            if checks[check][1] <= lanes.limits_s[lane] or lane == last:
                verdicts[check] = now
            else:
                lanes.wait(lane + 1, check)
        while idle and (started := lanes.start_next()) is not None:
            idle -= 1
            lane, begun = started
            heapq.heappush(events, (now + min(checks[begun][1], lanes.limits_s[lane]), begun, lane))
    return verdicts


def test_check_alone_starts_again_with_longer_slices():
    assert SLICES_S == (0.003, 0.01, 0.03, 0.1)
    # 20 ms: slices of 3 and 10 in vain, then its 20. 200 ms: 3 + 10 + 30 + 100 in vain, then its 200.
    assert play(2, [(0.0, 0.002)]) == pytest.approx([0.002])
    assert play(2, [(0.0, 0.020)]) == pytest.approx([0.033])
    assert play(2, [(0.0, 0.200)]) == pytest.approx([0.343])
    assert play(2, [(0.0, FOREVER)]) == pytest.approx([0.143 + TIMEOUT_S])


def test_honest_answer_waits_for_the_first_slices_before_it():
    # One worker. Three bombs use 3 ms each, then the honest answers of 2 ms come, before any slice of 10 ms.
    verdicts = play(1, [(0.0, FOREVER)] * 3 + [(0.0, 0.002)] * 2)
    assert verdicts[3:] == pytest.approx([0.011, 0.013])
    # Then all of 10, 30 and 100 ms, then 5 s each in turn.
    assert verdicts[:3] == pytest.approx([0.433 + TIMEOUT_S * i for i in (1, 2, 3)])


def test_slow_lane_leaves_one_of_several_workers_free():
    # Both bombs have had their slices after 143 ms. One is in the slow lane until 5.143 s, the other waits for it.
    verdicts = play(2, [(0.0, FOREVER), (0.0, FOREVER), (1.0, 0.002)])
    assert verdicts == pytest.approx([0.143 + TIMEOUT_S, 0.143 + 2 * TIMEOUT_S, 1.002])


@pytest.mark.parametrize(("bombs", "honest"), [(100, 100), (30, 200), (150, 50)])
@pytest.mark.parametrize("seed", range(5))
def test_bombs_cost_honest_answers_at_most_three_slices(bombs, honest, seed):
    rng = Random(seed)
    checks = [(0.0, FOREVER)] * bombs + [(0.0, rng.uniform(0.0002, SLICES_S[0])) for _ in range(honest)]
    rng.shuffle(checks)
    verdicts = play(2, checks)
    waits = sorted(end - cost for (_, cost), end in zip(checks, verdicts, strict=True) if cost < FOREVER)
    assert waits[math.ceil(0.95 * honest) - 1] <= 3 * SLICES_S[-1]
    assert not any(map(math.isnan, verdicts))


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("seed", range(20))
def test_short_check_waits_for_one_long_slice_and_the_first_slices_before_it(workers, seed):
    rng = Random(seed)
    costs = [FOREVER, 0.5, 0.05, 0.005, 0.002]
    checks = sorted((rng.choice([0.0, rng.uniform(0, 3)]), rng.choice(costs)) for _ in range(rng.randint(2, 120)))
    verdicts = play(workers, checks)
    for order, (arrival, cost) in enumerate(checks):
        if cost <= SLICES_S[0]:
            before = sum(
                min(other, SLICES_S[0])
                for (_, other), end in zip(checks[:order], verdicts[:order], strict=True)
                if end > arrival
            )
            # One worker is never in the slow lane. It may be in the longest slice, and then takes first slices only.
            assert verdicts[order] - arrival - cost <= SLICES_S[-1] + before + 1e-9


def test_check_that_leaves_is_not_started():
    lanes: Lanes[str] = Lanes(workers=1, timeout_s=TIMEOUT_S)
    lanes.wait(0, "a")
    lanes.wait(0, "b")
    lanes.leave(0, "a")
    assert (len(lanes), lanes.start_next(), lanes.start_next(), len(lanes)) == (1, (0, "b"), None, 0)


def test_limit_below_the_slices_is_the_only_lane():
    assert Lanes(workers=2, timeout_s=0.002).limits_s == (0.002,)
    assert Lanes(workers=2, timeout_s=0.02).limits_s == (0.003, 0.01, 0.02)
    lanes: Lanes[str] = Lanes(workers=2, timeout_s=0.002)
    lanes.wait(0, "a")
    lanes.wait(0, "b")
    assert [lanes.start_next(), lanes.start_next()] == [(0, "a"), (0, "b")]
