"""Weight of every trained token in the optimizer batch's loss (docs/algorithms.md §4).

All four aggregations weigh the tokens of a rollout equally, so a weight per rollout says everything, and the batch's
loss is `Σ weight · loss_t` however it is packed. A rollout of weight zero (overlong filtering) remains a member of the
batch and of its group, but its tokens count in no denominator.

Shapes: N rollouts of the optimizer batch.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

AggregationKind = Literal["sum_over_batch", "token_mean", "sample_mean", "prompt_mean"]


@dataclass(frozen=True, kw_only=True)
class Members:
    """What decides about the weights of N rollouts."""

    tokens_N: np.ndarray
    """int64, trained tokens of each rollout, all positive."""
    weighted_N: np.ndarray
    """bool, False where the rollout's weight is zero."""
    group_sizes_N: np.ndarray
    """int64, rollouts of its whole group that can be trained, in whichever step they are."""
    group_tokens_N: np.ndarray
    """int64, trained tokens of those that have a weight."""


def rollout_weights(kind: AggregationKind, members: Members) -> np.ndarray:
    """float64 [N]: weight of each trained token of each rollout.

    In `prompt_mean` a group is worth 1 / (groups of the batch), shared by its tokens. A group that the end of the batch
    cuts keeps its weights: a rollout is worth its share of its own group, and counts as 1 / size of a group.
    """
    n, weighted_N = len(members.tokens_N), members.weighted_N
    counted_N = np.where(weighted_N, members.tokens_N, 0).astype(np.float64)
    if kind == "sum_over_batch":
        denominators_N = np.full(n, float(n))
    elif kind == "token_mean":
        denominators_N = np.full(n, counted_N.sum())
    elif kind == "sample_mean":
        denominators_N = n * counted_N
    else:
        denominators_N = (1.0 / members.group_sizes_N).sum() * members.group_tokens_N
    return np.divide(1.0, denominators_N, out=np.zeros(n), where=weighted_N & (denominators_N > 0))
