"""Predicts the share of rollouts that a bound on the lag drops, from the oldest token's lag (docs/algorithms.md §8).

The members of a group start together and are published together when the longest has ended. The lag of their oldest
tokens is therefore that of the longest member of m tokens, m·H·I/(L̄·B) steps rounded up, plus the steps that the group
then waits.
"""

import math

import msgspec
import numpy as np

from pipelinerl.plan.throughput import PipelinePlan, Workload

QUEUED_STEPS = 2
"""Steps between publication and training: one for the batch being filled and one for the batch being trained."""
TOLERATED = 0.01


class DropShares(msgspec.Struct, frozen=True, kw_only=True):
    """Share of rollouts whose oldest token is beyond the bound, of all and of the longest tenth."""

    rollouts: float
    longest_tenth: float


def steps_per_token(work: Workload, plan: PipelinePlan) -> float:
    """Optimizer steps that pass while a slot decodes one token."""
    return plan.concurrency * plan.generating / (work.lengths.mean * work.batch_size)


def drop_shares(work: Workload, plan: PipelinePlan, attempts: int, max_lag_steps: int) -> DropShares:
    """Predict the shares for groups of ``attempts`` rollouts and a bound of ``max_lag_steps`` optimizer steps."""
    longest_kept = max(math.floor((max_lag_steps - QUEUED_STEPS) / steps_per_token(work, plan) + 1e-9), 0)
    below = float(work.lengths.probabilities[:longest_kept].sum())
    tenth = _longest_tenth(work.lengths.probabilities)
    kept_tenth = float(tenth[:longest_kept].sum()) * below ** (attempts - 1)
    return DropShares(rollouts=1.0 - below**attempts, longest_tenth=1.0 - kept_tenth)


def recommended_bound(work: Workload, plan: PipelinePlan, attempts: int) -> int:
    """The lowest `max_lag_steps` that drops at most 1 % of the longest tenth, for groups of ``attempts`` rollouts."""
    bound = QUEUED_STEPS
    while drop_shares(work, plan, attempts, bound).longest_tenth > TOLERATED:
        bound += 1
    return bound


def _longest_tenth(probabilities: np.ndarray) -> np.ndarray:
    """[L] probabilities of the lengths in the longest tenth."""
    above = np.cumsum(probabilities[::-1])[::-1]
    part = np.minimum(probabilities, np.maximum(0.1 - (above - probabilities), 0.0))
    return part / part.sum()
