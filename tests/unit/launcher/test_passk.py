"""pass@k by hand, by counting subsets, and intervals that hold the truth as often as they say."""

import math
import random
from itertools import combinations

import pytest

from pipelinerl.inspect.curves import wilson
from pipelinerl.launcher.evaluate import Estimate, Tally, effective_size, estimate, pass_at_k, powers_up_to


@pytest.mark.parametrize(
    ("attempts", "solved", "k", "expected"),
    [
        (1, 1, 1, 1.0),
        (1, 0, 1, 0.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 − C(3, 2) / C(4, 2) = 1 − 3/6
        (4, 2, 2, 5 / 6),  # 1 − C(2, 2) / C(4, 2) = 1 − 1/6
        (4, 3, 2, 1.0),  # two wrong ones do not exist
        (5, 2, 3, 9 / 10),  # 1 − C(3, 3) / C(5, 3)
        (10, 0, 10, 0.0),
    ],
)
def test_estimator_by_hand(attempts: int, solved: int, k: int, expected: float) -> None:
    assert pass_at_k(Tally(attempts, solved), k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("solved", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_estimator_is_the_share_of_subsets_with_a_solution(solved: int, k: int) -> None:
    subsets = list(combinations([True] * solved + [False] * (6 - solved), k))
    assert pass_at_k(Tally(6, solved), k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_estimator_of_many_attempts_is_finite_and_agrees_with_exact_integers() -> None:
    n, c, k = 10_000, 3, 1_000
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(Tally(n, c), k) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_k_beyond_the_attempts_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=r"pass@1 to pass@4"):
        pass_at_k(Tally(4, 1), k)


def test_single_attempts_have_wilsons_interval_of_one_trial_less() -> None:
    # 8 of 10 solved: variance of the mean p(1 − p) / 9, so 9 trials; Wilson for 0.8 and 9 by hand: 0.474 … 0.947
    outcomes = [Tally(1, 1)] * 8 + [Tally(1, 0)] * 2
    found = estimate(outcomes, 1)
    assert found is not None
    assert (found.value, found.problems) == (0.8, 10)
    assert (found.low, found.high) == pytest.approx((0.4738, 0.9467), abs=5e-4)


def test_interval_has_a_width_where_every_problem_agrees() -> None:
    # none of 20: the upper end is z² / (n + z²)
    found = estimate([Tally(4, 0)] * 20, 2)
    assert found is not None
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(3.8415 / 23.8415, abs=1e-4)


def test_attempts_at_one_problem_are_not_independent_trials() -> None:
    """Problems that are solved always or never say no more with 64 attempts than with one."""
    always_or_never = [Tally(64, 64)] * 5 + [Tally(64, 0)] * 5
    even = [Tally(64, 32)] * 10
    assert effective_size([pass_at_k(outcome, 1) for outcome in always_or_never]) == pytest.approx(9)
    wide, narrow = estimate(always_or_never, 1), estimate(even, 1)
    assert wide is not None
    assert narrow is not None
    assert wide.high - wide.low >= narrow.high - narrow.low


def test_interval_holds_the_truth_in_about_95_of_100_data_sets() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(400):
        rates = [rng.choice((0.05, 0.3, 0.9)) for _ in range(60)]  # their mean is 0.41667 in the population
        outcomes = [Tally(4, sum(rng.random() < rate for _ in range(4))) for rate in rates]
        found = estimate(outcomes, 1)
        assert found is not None
        held += found.low <= (0.05 + 0.3 + 0.9) / 3 <= found.high
    assert 0.92 <= held / 400 <= 0.98


@pytest.mark.parametrize(
    ("problems", "attempts", "k", "shape"),
    [(20, 8, 4, (7, 3)), (60, 8, 4, (9, 1)), (30, 64, 8, (9, 1)), (30, 64, 4, (30, 1)), (200, 8, 8, (9, 1))],
)
def test_interval_near_one_holds_the_truth_in_at_least_93_of_100_data_sets(
    problems: int, attempts: int, k: int, shape: tuple[int, int]
) -> None:
    """Rates p of the problems are Beta(a, b), so that the mean of (1 − p)^k is Π (b + i) / (a + b + i) for i < k."""
    rng = random.Random(0)
    truth = 1 - math.prod((shape[1] + i) / (sum(shape) + i) for i in range(k))
    held = 0
    for _ in range(400):
        rates = [rng.betavariate(*shape) for _ in range(problems)]
        found = estimate([Tally(attempts, sum(rng.random() < rate for _ in range(attempts))) for rate in rates], k)
        assert found is not None
        held += found.low <= truth <= found.high
    assert held / 400 >= 0.93


def test_more_attempts_than_were_made_are_never_counted() -> None:
    """One of 20 problems fails in 5 of 8 attempts: pass@4 is 1 − C(5, 4) / C(8, 4) = 13/14. 160 trials at most."""
    found = estimate([Tally(8, 8)] * 19 + [Tally(8, 3)], 4)
    assert found is not None
    assert (found.low, found.high) == pytest.approx(wilson((19 + 13 / 14) / 20, 160))


def test_problems_with_too_few_attempts_are_left_out() -> None:
    assert estimate([Tally(1, 1)], 2) is None
    assert estimate([Tally(1, 1), Tally(2, 0)], 2) == Estimate(0.0, *wilson(0.0, 1), 1)


@pytest.mark.parametrize(("attempts", "ks"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_values_of_k_that_are_shown(attempts: int, ks: list[int]) -> None:
    assert powers_up_to(attempts) == ks
