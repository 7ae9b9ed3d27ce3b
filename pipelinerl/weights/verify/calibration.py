"""Decides from two lists of log-probabilities whether a server samples from the weights it was sent. Pure.

Two kernels differ by noise that depends on the model (0.016 nats at a logit deviation of 1, 0.05 at 4, 24 layers), so
each server is calibrated while both ends hold the same file. Later their changes are compared (docs/algorithms.md §10):

    e = (server − server₀) − (trainer − trainer₀)
"""

from dataclasses import dataclass, replace

import numpy as np

CLIP = 8.0
"""Differences are clipped at this many noise deviations, so that a few outliers of healthy kernels do not decide."""
LIMIT = 3.0
"""Largest allowed statistic, in noise deviations. Healthy servers have √2, from the noise of two versions."""
POWER = 12.0
"""Minimum distance between an applied and a missed update, in deviations of the comparison, for a decision."""
NOISE_FLOOR = 2e-4
"""Lower bound of the noise in nats. Below it, rounding that changes with the batch would decide on float32 servers."""
MEMORY = 0.8
"""Weight of the old noise in its running average. The noise grows slowly as training sharpens the model."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Calibration of one server. N scored tokens."""

    offset: np.ndarray
    """float64 [N]: server − trainer at equal weights."""
    calibrated: float
    """Deviation of server − trainer in nats at calibration."""
    noise: float
    """The same over the versions that passed since, at least ``calibrated``."""
    tolerance: float
    """`weights.probe_tolerance`: upper bound of the noise."""
    server: np.ndarray
    """float64 [N]: the server's log-probability of each token under the newest version that passed on it."""
    trainer: np.ndarray
    """float64 [N]: the trainer's under the same version."""


@dataclass(frozen=True, kw_only=True)
class LogprobVerdict:
    """Result of comparing the log-probabilities of one version."""

    fault: str = ""
    """Empty = the log-probabilities show no fault."""
    difference: float = 0.0
    """Nats: the statistic of the residual."""
    limit: float = 0.0
    """Nats: the largest difference that passes."""
    followed: float | None = None
    """Share of the trainer's change that the server shows: 1 or more, or about 0 for a missed update. None = the change
    is too small compared with the noise to decide."""


def statistic(differences: np.ndarray, noise: float) -> float:
    """Returns the root mean square of differences [N] in nats, clipped at `CLIP` × noise. Infinite if not finite."""
    if not np.isfinite(differences).all():
        return float("inf")
    bound = CLIP * noise
    return float(np.sqrt(np.mean(np.square(np.clip(differences, -bound, bound)))))


def mean_difference(baseline: Baseline) -> float:
    """Mean |server − trainer| in nats over the probe's tokens, each under the newest version that passed on it."""
    return float(np.mean(np.abs(baseline.server - baseline.trainer)))


def calibrate(server: np.ndarray, trainer: np.ndarray, tolerance: float) -> tuple[Baseline, LogprobVerdict]:
    """Returns the baseline of a server whose weights equal the trainer's, and the verdict on its noise.

    Args:
        server, trainer: float [N] log-probabilities of the same tokens.
        tolerance: largest noise of a healthy server in nats. With more noise the verdict has a fault.
    """
    server, trainer = server.astype(np.float64), trainer.astype(np.float64)
    offset = server - trainer
    spread = 1.4826 * float(np.median(np.abs(offset)))  # the deviation of a normal distribution with this median
    noise = statistic(offset, max(spread, NOISE_FLOOR / CLIP))
    fault = "" if noise <= tolerance else "its log-probabilities are not those of the model's file"
    verdict = LogprobVerdict(fault=fault, difference=noise, limit=tolerance)
    noise = max(noise, NOISE_FLOOR)
    return Baseline(
        offset=offset, calibrated=noise, noise=noise, tolerance=tolerance, server=server, trainer=trainer
    ), verdict


def check_version(
    baseline: Baseline, server: np.ndarray, trainer: np.ndarray, scored: np.ndarray | None = None
) -> tuple[Baseline, LogprobVerdict]:
    """Compares a later version. Returns the verdict and the baseline, which includes the version if it passed.

    Args:
        server, trainer: float [N] log-probabilities of the probe's tokens under the same version.
        scored: bool [N] tokens that are compared, at least one. None = all.
    """
    scored = np.ones(len(server), dtype=bool) if scored is None else scored
    server = np.where(scored, server.astype(np.float64), baseline.server)
    trainer = np.where(scored, trainer.astype(np.float64), baseline.trainer)
    difference = statistic((server - trainer - baseline.offset)[scored], baseline.noise)
    verdict = LogprobVerdict(
        difference=difference, limit=LIMIT * baseline.noise, followed=_followed(baseline, server, trainer, scored)
    )
    if not difference <= verdict.limit:
        return baseline, replace(verdict, fault="its log-probabilities are not those of the weights it was sent")
    if verdict.followed is not None and verdict.followed < 0.5:
        return baseline, replace(verdict, fault="its log-probabilities did not move with the weights it was sent")
    own = max(difference**2 - baseline.calibrated**2, 0.0) ** 0.5  # the rest is the calibration's noise, in the offset
    noise = MEMORY * baseline.noise + (1 - MEMORY) * own
    noise = max(baseline.calibrated, min(noise, baseline.tolerance))
    return replace(baseline, noise=noise, server=server, trainer=trainer), verdict


def _followed(baseline: Baseline, server: np.ndarray, trainer: np.ndarray, scored: np.ndarray) -> float | None:
    """Returns server's change · trainer's change / ‖trainer's change without noise‖², or None if noise would decide.

    The product is ‖δ‖² for an applied update δ and 0 for a missed one. Its deviation is at most
    noise·‖trainer's change‖, because the noise of both ends is independent. At most 2·N·noise² of the trainer's squared
    change is its own noise, from two versions.
    """
    bound = CLIP * baseline.noise
    change = np.clip(trainer - baseline.trainer, -bound, bound)[scored]
    length = float(np.linalg.norm(change))
    power = length**2 - 2 * len(change) * baseline.noise**2
    if not power > POWER * baseline.noise * length:
        return None
    return float(np.dot(np.clip(server - baseline.server, -bound, bound)[scored], change) / power)
