"""How far a curve moved: by hand, and on noise."""

import math
import random

import pytest

from pipelinerl.inspect.curves import ends_of, noise_of, shift_of, worth_of


def test_noise_is_that_of_one_point_whatever_the_trend() -> None:
    rng = random.Random(0)
    values = [0.01 * place + rng.gauss(0, 0.2) for place in range(2000)]
    assert noise_of(values) == pytest.approx(0.2, rel=0.08)
    assert noise_of([1.0]) == 0.0


def test_ends_are_means_of_eight_points_or_of_a_third() -> None:
    assert ends_of([float(i) for i in range(100)]) == (3.5, 95.5)
    assert ends_of([0.0, 0.0, 3.0, 3.0, 6.0, 6.0]) == (0.0, 6.0)


def test_shift_is_certain_beyond_four_standard_errors() -> None:
    """Neighbours differ by 1, so a point's noise is 1 / 0.6745 / √2 and the error of eight against eight half of it."""
    zigzag = [0.0, 1.0] * 20
    error = 1 / 0.6745 / math.sqrt(2) / 2
    assert shift_of(zigzag).error == pytest.approx(error)
    raised = [value + (4.1 * error if place >= 20 else 0) for place, value in enumerate(zigzag)]
    assert shift_of(raised).rose
    assert not shift_of([value + (3.9 * error if place >= 20 else 0) for place, value in enumerate(zigzag)]).rose
    assert shift_of([-value for value in raised]).fell


def test_a_share_has_the_noise_of_counting_where_neighbours_are_equal() -> None:
    """√(2 · 0.5 · 0.5 / 1000) = 0.0224: four of them are 0.089."""
    assert shift_of([0.5] * 20, trials=1000).error == pytest.approx(math.sqrt(0.5 / 1000))
    assert not shift_of([0.46] * 12 + [0.54] * 12, trials=1000).rose
    assert shift_of([0.45] * 12 + [0.55] * 12, trials=1000).rose


def test_worth_is_the_slope_of_jitter_and_not_of_a_common_trend() -> None:
    """Success jitters by ± .01 and the reward by three times of it in the same places, whatever both trends are."""
    jitter = [0.01 * (-1) ** place for place in range(41)]
    success = [0.002 * place + value for place, value in enumerate(jitter)]
    assert worth_of(success, [0.05 * place + 3 * value for place, value in enumerate(jitter)]) == pytest.approx(3.0)
    assert worth_of(success, [0.05 * place for place in range(41)]) == pytest.approx(0.0)
    assert worth_of(success, [-value for value in success]) == 0.0, "what is punished adds nothing"
    assert worth_of([0.5] * 41, success) == 0.0
