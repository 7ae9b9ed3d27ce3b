"""Off-policy corrections of the ratio of the proximal policy, or the trained one, to the sampler.

A ratio is counted ONCE. Truncation (TIS) bounds it, masking (MIS) and veto set it to 0. A loss multiplies by the
corrected ratio, or by the mask alone if it already contains the ratio (docs/algorithms.md §2).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipelinerl.finetune.rl.tokens import LARGEST_EXPONENT, TokenInputs, segment_sum


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """The configured bounds C. None: off. In the sequence forms ρ is the product over the sequence's tokens."""

    token_tis: float | None = None
    sequence_tis: float | None = None
    token_mis: float | None = None
    token_mis_low: float | None = None
    sequence_mis: float | None = None
    veto: float | None = None

    @property
    def truncation(self) -> float | None:
        """Bound of the weight. None: not truncated."""
        return self.token_tis if self.token_tis is not None else self.sequence_tis

    @property
    def masks(self) -> bool:
        return any(bound is not None for bound in (self.token_mis, self.sequence_mis, self.veto))

    @property
    def sequence_level(self) -> bool:
        return any(bound is not None for bound in (self.sequence_tis, self.sequence_mis, self.veto))

    @property
    def weighs_sequences(self) -> bool:
        """Whether the weight is the sequence's ratio instead of the token's: only the sequence form is set."""
        if self.truncation is not None:
            return self.token_tis is None
        return self.sequence_mis is not None and self.token_mis is None

    @property
    def mask_bounds_weight(self) -> bool:
        """Whether a mask alone bounds the weight: ρ·1[ρ ≤ C]."""
        own = self.sequence_mis if self.weighs_sequences else self.token_mis
        return self.truncation is None and own is not None


class Corrected(NamedTuple):
    weight_K: Tensor
    """The truncated and masked ratio, without gradient."""
    mask_K: Tensor
    """0 or 1"""
    changed_K: Tensor
    """bool: whether the token is truncated or masked."""


def corrected(
    log_ratio_K: Tensor, inputs: TokenInputs, corrections: Corrections, largest: float | None = None
) -> Corrected:
    """Apply ``corrections`` to the log-ratios of a micro-batch. Collective within ``inputs.group``.

    Args:
        largest: bound of a weight that no correction bounds. None: it has no bound.
    """
    log_ratio_K = log_ratio_K.detach()
    kept_K = torch.ones_like(log_ratio_K, dtype=torch.bool)
    whole_K = log_ratio_K
    if corrections.sequence_tis is not None or corrections.sequence_mis is not None:
        whole_K = segment_sum(log_ratio_K, inputs)[inputs.segments_K]
    if corrections.token_mis is not None:
        kept_K &= log_ratio_K <= math.log(corrections.token_mis)
    if corrections.token_mis_low is not None:
        kept_K &= log_ratio_K >= math.log(corrections.token_mis_low)
    if corrections.sequence_mis is not None:
        kept_K &= whole_K <= math.log(corrections.sequence_mis)
    if corrections.veto is not None:
        below_K = log_ratio_K < math.log(corrections.veto)
        kept_K &= (segment_sum(below_K.to(log_ratio_K.dtype), inputs) == 0)[inputs.segments_K]
    counted_K = whole_K if corrections.weighs_sequences else log_ratio_K
    bound = corrections.truncation
    if bound is None and not corrections.mask_bounds_weight:
        bound = largest
    bound = LARGEST_EXPONENT if bound is None else min(math.log(bound), LARGEST_EXPONENT)
    mask_K = kept_K.to(log_ratio_K.dtype)
    weight_K = counted_K.clamp(max=bound).exp() * mask_K
    return Corrected(weight_K, mask_K, ~kept_K | (counted_K > bound))
