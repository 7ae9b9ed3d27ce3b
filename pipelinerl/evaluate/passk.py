"""pass@k with confidence intervals, from how often each problem was solved. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelinerl.inspect.page.data import wilson


@dataclass(frozen=True)
class Tally:
    """The attempts at one problem."""

    attempts: int
    solved: int


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its interval of 95 %."""

    value: float
    low: float
    high: float
    problems: int


def pass_at_k(tally: Tally, k: int) -> float:
    """Probability that at least one of k attempts solves the problem, 1 − C(n − c, k) / C(n, k).

    The unbiased estimator of Chen et al., 2021 (arXiv:2107.03374, equation 1), as a product that does not overflow.

    >>> pass_at_k(Tally(attempts=4, solved=1), 2)
    0.5
    """
    n, c = tally.attempts, tally.solved
    if not 0 < k <= n:
        raise ValueError(f"k is {k}: a problem with {n} attempts has pass@1 to pass@{n}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def estimate(tallies: Iterable[Tally], k: int) -> Estimate | None:
    """Mean pass@k of the problems with at least k attempts. None if there are none."""
    values = [pass_at_k(tally, k) for tally in tallies if tally.attempts >= k]
    if not values:
        return None
    mean = sum(values) / len(values)
    low, high = wilson(mean, effective_size(values))
    return Estimate(mean, low, high, len(values))


def effective_size(values: Sequence[float]) -> float:
    """Number of single trials whose mean varies as much as that of these values in [0, 1], p(1 − p) / se² (Kish).

    Problems are the sample, so the standard error is that of the mean over problems. Where all values agree it is the
    number of problems.
    """
    count, mean = len(values), sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
    return mean * (1 - mean) / (variance / count) if variance > 0 else float(count)


def powers_up_to(attempts: int) -> list[int]:
    """1, 2, 4, … and the number of attempts itself."""
    return sorted({2**i for i in range(attempts.bit_length()) if 2**i <= attempts} | {attempts})
