"""Completion lengths for the planner: the share of sequences that still decode at each decoding step."""

from functools import cached_property
from math import erf, sqrt

import numpy as np


class Lengths:
    """A distribution of completion lengths in tokens.

    Args:
        probabilities: [L] probability of length 1 … L.

    Example:
        >>> uniform = Lengths.uniform(4)
        >>> uniform.mean, uniform.longest, uniform.alive.tolist()
        (2.5, 4, [1.0, 0.75, 0.5, 0.25])
    """

    def __init__(self, probabilities: np.ndarray):
        probabilities = np.asarray(probabilities, dtype=np.float64)
        if probabilities.ndim != 1 or not len(probabilities) or probabilities.min() < 0 or probabilities.sum() <= 0:
            raise ValueError("lengths need one non-negative probability for each length from 1, not all of them zero")
        self.probabilities = np.trim_zeros(probabilities, "b") / probabilities.sum()

    @classmethod
    def uniform(cls, longest: int) -> "Lengths":
        """Every length from 1 to ``longest`` with the same probability."""
        return cls(np.full(longest, 1.0 / longest))

    @classmethod
    def constant(cls, length: int) -> "Lengths":
        return cls(np.eye(1, length, length - 1)[0])

    @classmethod
    def lognormal(cls, mean: float, longest: int, sigma: float = 0.8) -> "Lengths":
        """Log-normal lengths cut at ``longest``, where a server ends them.

        Args:
            mean: after the cut, from 1 to ``longest``.
            sigma: standard deviation of the logarithm before the cut.

        Raises:
            ValueError: the mean is out of range.
        """
        if not 1 <= mean <= longest:
            raise ValueError(f"the mean length {mean} must lie between 1 and the longest, {longest}")
        low, high = 0.0, np.log(longest) + 8 * sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cls._cut_lognormal(middle, sigma, longest).mean < mean else (low, middle)
        return cls._cut_lognormal(high, sigma, longest)

    @classmethod
    def _cut_lognormal(cls, mu: float, sigma: float, longest: int) -> "Lengths":
        edges = (np.log(np.arange(1, longest)) - mu) / sigma
        below = np.concatenate([[0.0], _normal_cdf(edges), [1.0]])
        return cls(np.diff(below))

    @cached_property
    def longest(self) -> int:
        return len(self.probabilities)

    @cached_property
    def mean(self) -> float:
        return float(self.alive.sum())

    @cached_property
    def alive(self) -> np.ndarray:
        """[L] share of sequences that decode in step l = 1 … L."""
        return np.cumsum(self.probabilities[::-1])[::-1]

    @cached_property
    def mean_square(self) -> float:
        return float((self.probabilities * np.arange(1, self.longest + 1) ** 2).sum())

    @cached_property
    def residual_alive(self) -> np.ndarray:
        """[L] share of the sequences at a random moment of steady generation that decode l more steps or longer.

        This is the residual lifetime of renewal theory.
        """
        return np.cumsum(self.alive[::-1])[::-1] / self.mean

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int64 [count] random lengths."""
        return rng.choice(np.arange(1, self.longest + 1), size=count, p=self.probabilities)


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.array([erf(value / sqrt(2.0)) for value in x]))
