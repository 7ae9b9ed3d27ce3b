"""How far a curve moved, in units of the run's own noise. Pure functions over plain numbers.

The noise of one point is taken from the differences between neighbours, which a trend hardly changes. A share of many
rollouts has the noise of counting as well, which remains where neighbours are equal because they are running means.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

WINDOW = 8
"""Number of points at the beginning and at the end of a curve that are compared, at most a third of them each."""
NORMAL_MAD = 0.6745
"""Median of |x| of a standard normal variable."""
CERTAIN = 4.0
"""Standard errors beyond which a difference is no accident, although many curves are looked at."""
Z_95 = 1.959964
"""Standard normal quantile of a two-sided 95 % interval."""


class Shift(NamedTuple):
    """The change from the beginning of a curve to its end."""

    before: float
    now: float
    error: float
    """Standard error of the difference."""

    @property
    def rose(self) -> bool:
        return self.now - self.before > CERTAIN * self.error

    @property
    def fell(self) -> bool:
        return self.before - self.now > CERTAIN * self.error


def noise_of(values: Sequence[float]) -> float:
    """Standard deviation of one point around the trend."""
    steps = [abs(after - before) for before, after in pairwise(values)]
    return statistics.median(steps) / NORMAL_MAD / math.sqrt(2) if steps else 0.0


def ends_of(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last `WINDOW` points, or of a third of them each."""
    window = max(1, min(WINDOW, len(values) // 3))
    return statistics.fmean(values[:window]), statistics.fmean(values[-window:])


def shift_of(values: Sequence[float], *, trials: int | None = None) -> Shift:
    """The change of a curve of at least three points.

    Args:
        trials: of a share, the number of trials behind each point, which neighbours may have in common.
    """
    before, now = ends_of(values)
    window = max(1, min(WINDOW, len(values) // 3))
    error = noise_of(values) * math.sqrt(2 / window)
    if trials:
        counting = sum(max(share * (1 - share), 1 / trials) for share in (before, now)) / trials
        error = max(error, math.sqrt(counting))
    return Shift(before, now, error)


def worth_of(shares: Sequence[float], values: Sequence[float]) -> float:
    """How much a unit of the first curve adds to the second one, at least 0. Both have the same points."""
    # the slope of the steps, less the mean step: a trend of both curves shows no connection
    steps, values_steps = ([after - before for before, after in pairwise(curve)] for curve in (shares, values))
    if len(set(steps)) < 2:
        return 0.0
    return max(0.0, statistics.linear_regression(steps, values_steps).slope)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of ``count`` trials, or an effective number of them (JASA 22, 1927, p. 209)."""
    if not count:
        return 0.0, 1.0
    square = Z_95**2 / count
    middle = share + square / 2
    half = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))
