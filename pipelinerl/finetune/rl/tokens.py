"""The objective's inputs for the trained tokens of a micro-batch, and sums over their sequences.

Shapes: K trained tokens of one micro-batch, S its segments (a segment is one training sequence).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST_EXPONENT = 80.0
"""Upper bound of log-ratios in losses, because exp() of much more overflows float32. Diagnostics have no bound."""


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share the tokens of a micro-batch (`finetune.seq_parallel`)."""

    group: dist.ProcessGroup | None
    """None: all ranks."""
    index: int
    """Index of this rank in the group, and of its slice in the micro-batch."""
    size: int


class _GroupSum(torch.autograd.Function):
    """Sum over the ranks of a group. Every rank's loss depends on the sum, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Constants of the trained tokens of one micro-batch."""

    sampler_logprobs_K: Tensor
    """log μ"""
    advantages_K: Tensor
    weights_K: Tensor
    """Weight of each token in the optimizer batch's loss."""
    segments_K: Tensor
    """int64, ascending: index of the token's segment."""
    num_segments: int
    ref_logprobs_K: Tensor | None = None
    proximal_logprobs_K: Tensor | None = None
    """log π_prox. None: the trained policy's own, if the loss has a proximal policy."""
    group: SequenceGroup | None = None
    """Ranks that hold the other tokens of these segments. None: this rank holds all."""

    def __getitem__(self, rows: slice) -> "TokenInputs":
        ref, proximal = self.ref_logprobs_K, self.proximal_logprobs_K
        return TokenInputs(
            sampler_logprobs_K=self.sampler_logprobs_K[rows],
            advantages_K=self.advantages_K[rows],
            weights_K=self.weights_K[rows],
            segments_K=self.segments_K[rows],
            num_segments=self.num_segments,
            ref_logprobs_K=None if ref is None else ref[rows],
            proximal_logprobs_K=None if proximal is None else proximal[rows],
            group=self.group,
        )


@dataclass(frozen=True, kw_only=True)
class LagInputs:
    """Lag of the trained tokens of a micro-batch: optimizer steps between sampling and training."""

    lag_K: Tensor
    """int64"""
    in_flight_K: Tensor
    """int64: the part of the lag that passed while the sequence was still being sampled."""


def segment_sum(values_K: Tensor, inputs: TokenInputs) -> Tensor:
    """[S] sums over the trained tokens of each segment. Collective within ``inputs.group``."""
    sums_S = values_K.new_zeros(inputs.num_segments).index_add(0, inputs.segments_K, values_K)
    return sums_S if inputs.group is None else _GroupSum.apply(sums_S, inputs.group.group)


def bounded_exp(log_K: Tensor) -> Tensor:
    """exp() of log-ratios, bounded to avoid overflow of float32."""
    return log_K.clamp(max=LARGEST_EXPONENT).exp()
