"""Weight of every trained token in the optimizer batch's loss (docs/algorithms.md §4).

All four aggregations give every token of a rollout the same weight, so there is one weight per rollout. The batch's
loss is `Σ weight · loss_t`, which does not depend on packing. A rollout of weight zero (overlong filtering) remains a
member of the batch and of its group, but no denominator counts its tokens.

Shapes: N rollouts of the optimizer batch.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

AggregationKind = Literal["sum_over_batch", "token_mean", "sample_mean", "prompt_mean"]


@dataclass(frozen=True, kw_only=True)
class Members:
    """The properties of N rollouts that determine their weights."""

    tokens_N: np.ndarray
    """int64: trained tokens of each rollout, all positive."""
    weighted_N: np.ndarray
    """bool: False where the rollout's weight is zero."""
    group_sizes_N: np.ndarray
    """int64: rollouts of the whole group that can be trained, in any optimizer step."""
    group_tokens_N: np.ndarray
    """int64: trained tokens of the group's rollouts whose weight is not zero."""


def rollout_weights(kind: AggregationKind, members: Members) -> np.ndarray:
    """float64 [N]: weight of each trained token of each rollout, for aggregation ``kind``.

    In `prompt_mean` the tokens of a group share a total weight of 1 / (groups in the batch). If the end of the batch
    cuts a group, each rollout keeps its share of its whole group's weight, and counts as 1 / size of a group.
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
