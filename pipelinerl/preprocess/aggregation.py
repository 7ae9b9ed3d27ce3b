"""Weight of every trained token in the optimizer batch's loss (docs/algorithms.md §4).

All four aggregations weigh the tokens of a rollout equally, so a weight per rollout says everything, and the batch's
loss is `Σ weight · loss_t` however it is packed. A rollout of weight zero (overlong filtering) remains a member of the
batch and of its group, but its tokens count in no denominator.

Shapes: N rollouts of the optimizer batch.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

AggregationKind = Literal["sum_over_batch", "token_mean", "sample_mean", "prompt_mean"]


def rollout_weights(
    kind: AggregationKind, tokens_N: np.ndarray, groups: Sequence[str], weighted_N: np.ndarray
) -> np.ndarray:
    """Weight of each trained token of each rollout.

    Args:
        tokens_N: int64, trained tokens of each rollout, all positive.
        groups: group id of each rollout; a group cut by the end of the batch counts with the part that is in it.
        weighted_N: bool, False where the rollout's weight is zero.

    Returns:
        float64 [N]
    """
    counted_N = np.where(weighted_N, tokens_N, 0).astype(np.float64)
    n = len(tokens_N)
    if kind == "sum_over_batch":
        denominators_N = np.full(n, float(n))
    elif kind == "token_mean":
        denominators_N = np.full(n, counted_N.sum())
    elif kind == "sample_mean":
        denominators_N = n * counted_N
    else:
        _, group_N = np.unique(np.asarray(groups), return_inverse=True)
        tokens_G = np.bincount(group_N, weights=counted_N)
        denominators_N = len(tokens_G) * tokens_G[group_N]
    return np.divide(1.0, denominators_N, out=np.zeros(n), where=weighted_N & (denominators_N > 0))
