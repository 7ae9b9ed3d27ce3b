"""The objective's inputs for the trained tokens of a micro-batch, and sums over their sequences.

Shapes: K trained tokens of one micro-batch, S its segments (a segment is one training sequence), J tokens that a
teacher finds most likely.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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

    def sum_(self, values: Tensor) -> None:
        """Replace the values by their sums over the ranks. Collective."""
        dist.all_reduce(values, group=self.group)


class _GroupSum(torch.autograd.Function):
    """Sum over the ranks of a group. Every rank's loss depends on the sum, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        ctx.sharing = group
        total = values.clone()
        group.sum_(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        ctx.sharing.sum_(gradient)
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
    rewards_K: Tensor | None = None
    """What the token's sequence returned: its rollout's reward, or the shaped return if the advantage is `value`."""
    lag_K: Tensor | None = None
    """int64: optimizer steps between sampling and training. None: unknown."""
    ref_logprobs_K: Tensor | None = None
    """log π_ref. None: not scored."""
    teacher_logprobs_K: Tensor | None = None
    """log π_T of the teacher of the token's domain. None: there is none."""
    teacher_top_ids_KJ: Tensor | None = None
    """int64: the tokens that the teacher finds most likely in the token's place. None: they were not asked for."""
    teacher_top_logprobs_KJ: Tensor | None = None
    """log π_T of these."""
    proximal_logprobs_K: Tensor | None = None
    """log π_prox. None: the trained policy's own, if the loss has a proximal policy."""
    supervised_K: Tensor | None = None
    """bool: whether the token is imitated with the weight ``advantages_K``. None: none is."""
    values_K: Tensor | None = None
    """V of the state before the token. None: there is no value head."""
    bootstrap_S: Tensor | None = None
    """V of the state after a segment's last trained token if its answer was cut, else 0. None: as ``values_K``."""
    group: SequenceGroup | None = None
    """Ranks that hold the other tokens of these segments. None: this rank holds all."""

    def __getitem__(self, rows: slice | Tensor) -> "TokenInputs":
        """The same for some of the tokens: a slice, bool [K], or their indices."""
        names = [field.name for field in fields(self) if field.name.endswith(("_K", "_KJ"))]
        columns = {name: getattr(self, name) for name in names}
        mine: dict[str, Any] = {name: None if value_K is None else value_K[rows] for name, value_K in columns.items()}
        return replace(self, **mine)


@dataclass(frozen=True, kw_only=True)
class LagInputs:
    """Lag of the trained tokens of a micro-batch: optimizer steps between sampling and training."""

    lag_K: Tensor
    """int64"""
    in_flight_K: Tensor
    """int64: the part of the lag that passed while the sequence was still being sampled."""

    def __getitem__(self, rows: Tensor) -> "LagInputs":
        """The same for some of the tokens."""
        return LagInputs(lag_K=self.lag_K[rows], in_flight_K=self.in_flight_K[rows])


def segment_sum(values_K: Tensor, inputs: TokenInputs) -> Tensor:
    """[S] sums over the trained tokens of each segment. Collective within ``inputs.group``."""
    sums_S = values_K.new_zeros(inputs.num_segments).index_add(0, inputs.segments_K, values_K)
    return sums_S if inputs.group is None else _GroupSum.apply(sums_S, inputs.group)


def discounted_sum(values_K: Tensor, factor: float, segments_K: Tensor) -> Tensor:
    """[K] Σ_j factor^j · values[k + j] over the rest of each token's segment, in log2(K) passes over all tokens."""
    reach = 1
    while reach < len(values_K):
        same_K = segments_K[reach:] == segments_K[:-reach]
        values_K = values_K + F.pad(torch.where(same_K, factor**reach * values_K[reach:], 0.0), (0, reach))
        reach *= 2
    return values_K


def bounded_exp(log_K: Tensor) -> Tensor:
    """exp() of log-ratios, bounded to avoid overflow of float32."""
    return log_K.clamp(max=LARGEST_EXPONENT).exp()
