"""Does a server sample from the weights it was sent? Decisions from two lists of log-probabilities. Pure.

Trainer and server score the same likely tokens with different kernels. In bfloat16 their values differ by a noise that
depends on the model (0.016 nats at a logit deviation of 1, 0.05 at 4, 24 layers) and that is drawn anew with every
version. A fixed bound either expels healthy servers or sees nothing, so each server is calibrated while both ends hold
the same file. Later versions are compared by their change (docs/algorithms.md §10):

    e = (server − server₀) − (trainer − trainer₀)           what the server's change lacks or has too much

`judge` finds two kinds of faults: weights that are wrong (e is larger than the noise allows) and an update that did not
happen (the server's change does not follow the trainer's).
"""

from dataclasses import dataclass, replace

import numpy as np

CLIP = 8.0
"""Differences count up to this many noise deviations: a few outliers of healthy kernels decide nothing."""
LIMIT = 3.0
"""Largest allowed statistic, in noise deviations. Healthy servers show √2: the noise of two versions."""
POWER = 12.0
"""How far a made and a missed update must lie apart, in deviations of the comparison, before it decides."""
NOISE_FLOOR = 2e-4
"""Nats. Below it float32 servers would be judged by rounding that changes with the batch."""
MEMORY = 0.8
"""Share of the noise that is remembered: it grows slowly when training sharpens the model."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What is known of one server. N scored tokens."""

    offset: np.ndarray
    """float64 [N]: server − trainer at equal weights."""
    calibrated: float
    """Deviation of server − trainer in nats at the calibration."""
    noise: float
    """The same from the versions that passed since; never less than at the calibration."""
    tolerance: float
    """`weights.probe_tolerance`: the noise never counts as larger than this."""
    server: np.ndarray
    """float64 [N]: the server's log-probabilities of the newest version that passed."""
    trainer: np.ndarray
    """float64 [N]: the trainer's of that version."""


@dataclass(frozen=True, kw_only=True)
class LogprobVerdict:
    """What the log-probabilities of one version say."""

    fault: str = ""
    """Empty: nothing is wrong as far as log-probabilities can show."""
    difference: float = 0.0
    """Nats: the statistic of the residual."""
    limit: float = 0.0
    """Nats: the largest difference that passes."""
    followed: float | None = None
    """The trainer's change as the server shows it: 1 or more, or about 0 for a missed update. None: the change is too
    small beside the noise to decide."""


def statistic(differences: np.ndarray, noise: float) -> float:
    """Root mean square of differences [N] in nats, each clipped at `CLIP` noise deviations; infinite if not finite."""
    if not np.isfinite(differences).all():
        return float("inf")
    bound = CLIP * noise
    return float(np.sqrt(np.mean(np.square(np.clip(differences, -bound, bound)))))


def calibrate(server: np.ndarray, trainer: np.ndarray, tolerance: float) -> tuple[Baseline, LogprobVerdict]:
    """The baseline of a server whose weights are the trainer's.

    Args:
        server, trainer: float [N] log-probabilities of the same tokens.
        tolerance: largest noise in nats that a healthy server may show. Beyond it the verdict has a fault.
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


def judge(baseline: Baseline, server: np.ndarray, trainer: np.ndarray) -> tuple[Baseline, LogprobVerdict]:
    """Compare a later version; the baseline that comes back includes it if it passed.

    Args:
        server, trainer: float [N] log-probabilities of the probe's tokens under the same version.
    """
    server, trainer = server.astype(np.float64), trainer.astype(np.float64)
    difference = statistic(server - trainer - baseline.offset, baseline.noise)
    verdict = LogprobVerdict(
        difference=difference, limit=LIMIT * baseline.noise, followed=_followed(baseline, server, trainer)
    )
    if not difference <= verdict.limit:
        return baseline, replace(verdict, fault="its log-probabilities are not those of the weights it was sent")
    if verdict.followed is not None and verdict.followed < 0.5:
        return baseline, replace(verdict, fault="its log-probabilities did not move with the weights it was sent")
    own = max(difference**2 - baseline.calibrated**2, 0.0) ** 0.5  # the rest is the calibration's noise, in the offset
    noise = MEMORY * baseline.noise + (1 - MEMORY) * own
    noise = max(baseline.calibrated, min(noise, baseline.tolerance))
    return replace(baseline, noise=noise, server=server, trainer=trainer), verdict


def _followed(baseline: Baseline, server: np.ndarray, trainer: np.ndarray) -> float | None:
    """Product of both changes over the trainer's own, without its noise; None where noise would decide.

    The product is ‖δ‖² for an update δ that was made and 0 for one that was missed. Its deviation is at most
    noise·‖trainer's change‖, because the ends' noises are independent. At most 2·N·noise² of the trainer's squared
    change is its own noise, of two versions.
    """
    bound = CLIP * baseline.noise
    change = np.clip(trainer - baseline.trainer, -bound, bound)
    length = float(np.linalg.norm(change))
    power = length**2 - 2 * len(change) * baseline.noise**2
    if not power > POWER * baseline.noise * length:
        return None
    return float(np.dot(np.clip(server - baseline.server, -bound, bound), change) / power)
