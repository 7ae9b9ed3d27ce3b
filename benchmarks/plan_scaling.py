"""`python -m benchmarks.plan_scaling RUN`: the scaling fit of a run's evaluations, or of a JSON file of pairs.

R(C) = R0 + (A − R0) / (1 + (C_mid/C)^B) (docs/algorithms.md §9, arXiv 2510.13786).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from pipelinerl.config.load import load_run
from pipelinerl.errors import ConfigError
from pipelinerl.records import EvaluationDone
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.records.topics import EVALUATION
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend

EXPONENTS = np.geomspace(0.1, 10.0, 41)
GRID = 21
REFINEMENTS = 5
PARAMETERS = 3


class ScalingFit(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted curve."""

    asymptote: float
    """A"""
    asymptote_error: float
    """One standard error. Infinite if the data do not bound A."""
    exponent: float
    """B"""
    midpoint: float
    """C_mid, in the unit of the given compute"""
    start: float
    """R0"""
    residual: float
    """Root mean square of the differences between rewards and curve."""

    def predict(self, compute: Sequence[float] | np.ndarray) -> np.ndarray:
        return scaling_curve(np.asarray(compute, dtype=np.float64), self)


def scaling_curve(compute: np.ndarray, fit: ScalingFit) -> np.ndarray:
    return fit.start + (fit.asymptote - fit.start) / (1.0 + (fit.midpoint / compute) ** fit.exponent)


def fit_scaling(
    compute: Sequence[float], reward: Sequence[float], *, start: float | None = None, ceiling: float = 1.0
) -> ScalingFit:
    """Fit the curve to rewards at growing compute.

    Args:
        compute: [n] positive, in any unit (GPU hours, tokens, optimizer steps). n ≥ 5.
        reward: [n] held-out success or reward.
        start: R0. None = the reward at the smallest compute.
        ceiling: largest possible A (1 for success rates).

    Raises:
        ValueError: too few points, or rewards that do not rise above R0.
    """
    c, r = np.asarray(compute, dtype=np.float64), np.asarray(reward, dtype=np.float64)
    if len(c) != len(r) or len(c) < PARAMETERS + 2 or c.min() <= 0:
        raise ValueError(
            f"a scaling fit needs at least {PARAMETERS + 2} pairs of positive compute and reward, got {len(c)}"
        )
    r0 = float(r[np.argmin(c)]) if start is None else start
    if r.max() <= r0 or ceiling <= r0:
        raise ValueError(f"the rewards (at most {r.max():g}) do not rise above R0 = {r0:g}: nothing to fit")
    asymptotes = np.linspace(r0 + 0.5 * (r.max() - r0), ceiling, GRID)
    midpoints = np.geomspace(c.min() / 10, c.max() * 10, GRID)
    best = _best(c, r, r0, asymptotes, midpoints)
    profile = _Profile(c, r, r0, midpoints)
    width = asymptotes[1] - asymptotes[0]
    for _ in range(REFINEMENTS):
        around = np.linspace(max(best[1] - 2 * width, r0), min(best[1] + 2 * width, ceiling), GRID)
        around = around[around > r0]
        sums = [profile(a)[0] for a in around]
        asymptote = float(around[int(np.argmin(sums))])
        best = (min(sums), asymptote)
        width = max(width * 4 / (GRID - 1), 1e-9)
    total, midpoint, exponent = profile(best[1])
    return ScalingFit(
        asymptote=best[1],
        asymptote_error=_asymptote_error(profile, best[1], total, len(c), r0, ceiling),
        exponent=exponent,
        midpoint=midpoint,
        start=r0,
        residual=float(np.sqrt(total / len(c))),
    )


def _best(
    c: np.ndarray, r: np.ndarray, r0: float, asymptotes: np.ndarray, midpoints: np.ndarray
) -> tuple[float, float]:
    sums = [_sums(c, r, r0, a, midpoints, EXPONENTS).min() for a in asymptotes]
    return float(min(sums)), float(asymptotes[int(np.argmin(sums))])


def _sums(
    c: np.ndarray, r: np.ndarray, r0: float, asymptote: float, midpoints: np.ndarray, exponents: np.ndarray
) -> np.ndarray:
    """[M, E] sums of squares over the data for each of M midpoints and E exponents."""
    ratio = np.log(midpoints)[:, None, None] - np.log(c)
    curve = r0 + (asymptote - r0) / (1.0 + np.exp(np.clip(exponents[None, :, None] * ratio, -700, 700)))
    return ((curve - r) ** 2).sum(axis=-1)


class _Profile:
    """Computes the least sum of squares at a given A, with the C_mid and B that reach it."""

    def __init__(self, c: np.ndarray, r: np.ndarray, r0: float, midpoints: np.ndarray):
        self.c, self.r, self.r0, self.midpoints = c, r, r0, midpoints

    def __call__(self, asymptote: float) -> tuple[float, float, float]:
        midpoints, exponents = self.midpoints, EXPONENTS
        for _ in range(REFINEMENTS):
            sums = _sums(self.c, self.r, self.r0, asymptote, midpoints, exponents)
            i, j = np.unravel_index(int(sums.argmin()), sums.shape)
            best = (float(sums[i, j]), float(midpoints[i]), float(exponents[j]))
            midpoints = _zoom(midpoints, int(i))
            exponents = _zoom(exponents, int(j))
        return best


def _zoom(grid: np.ndarray, index: int) -> np.ndarray:
    return np.geomspace(grid[max(index - 2, 0)], grid[min(index + 2, len(grid) - 1)], GRID)


def _asymptote_error(profile: _Profile, asymptote: float, total: float, count: int, r0: float, ceiling: float) -> float:
    """Larger distance from A to the ends of the range in which the sum of squares rises by one residual variance.

    An end beyond ``r0`` or ``ceiling`` does not count. Infinite if neither end counts.
    """
    limit = total + max(total, 1e-18) / (count - PARAMETERS)
    high = _crossing(profile, asymptote, ceiling, limit)
    low = _crossing(profile, asymptote, r0 + 1e-9 * max(abs(r0), 1.0), limit)
    sides = [abs(side - asymptote) for side in (low, high) if side is not None]
    return max(sides) if sides else float("inf")


def _crossing(profile: _Profile, inside: float, outside: float, limit: float) -> float | None:
    """The A between the best one and a bound at which the profile reaches the limit. None if it never does."""
    if profile(outside)[0] <= limit:
        return None
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if profile(middle)[0] <= limit else (inside, middle)
    return (inside + outside) / 2


def run_evaluations(run_dir: Path) -> list[tuple[float, float]]:
    """(optimizer steps, success) of every evaluation in the run's topic `evaluation`."""
    if load_run(run_dir).streams.backend != "files":
        raise ConfigError("streams.backend is redis: its topics are gone with the run, only the metrics remain")
    set_streams_backend("files")
    with open_reader(SingleStreamSpec(run_dir, EVALUATION), EvaluationMessage, name=None) as reader:
        done = [message for _, message in reader.read_all() if isinstance(message, EvaluationDone)]
    return sorted({message.version: message.success for message in done if message.success is not None}.items())


def run_scaling(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Fit held-out success against optimizer steps of a run, or the (compute, reward) pairs of a JSON file."""
    points = run_evaluations(args.source) if args.source.is_dir() else json.loads(args.source.read_text())
    start = next((float(reward) for compute, reward in points if compute == 0), None)
    compute, reward = zip(*[pair for pair in points if pair[0] > 0], strict=True)
    fit = fit_scaling(compute, reward, start=start, ceiling=args.ceiling)
    console.print(
        f"A = {fit.asymptote:.3f} ± {fit.asymptote_error:.3f}, B = {fit.exponent:.2f}, C_mid = {fit.midpoint:.3g}, "
        f"R0 = {fit.start:.3f}; residual {fit.residual:.3f} over {len(compute)} points"
    )
    return msgspec.to_builtins(fit)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="run folder, or JSON file with a list of [compute, reward]")
    parser.add_argument("--ceiling", type=float, default=1.0, help="largest possible value")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    args = parser.parse_args(argv)
    result = run_scaling(args, Console())
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
