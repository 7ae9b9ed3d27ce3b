"""Sequence parallelism: the ranks of a group share one micro-batch, each holding a slice of its tokens.

Everything in a transformer works token by token except attention, so each rank computes its slice and gathers only the
keys and values of all slices (as the context parallelism of Llama 3, arXiv:2407.21783 §3.3.2). A token's loss is
computed where its predecessor lies; sums over a sequence are taken over the group. Gradients add up over all ranks.

Shapes: T tokens of the micro-batch, padded to a multiple of the group's size; L = T / size tokens of a rank.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.rl.diagnostics import LagInputs
from pipelinerl.finetune.rl.losses import SequenceGroup, TokenInputs

ATTENTION = "pipelinerl_sequence"


def make_sequence_group(size: int) -> SequenceGroup | None:
    """This rank's group of ``size`` consecutive ranks; None for 1. Collective over all ranks."""
    if size == 1:
        return None
    rank, mine = dist.get_rank(), None
    for first in range(0, dist.get_world_size(), size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            mine = SequenceGroup(group, rank - first, size)
    return mine


def slice_batch(batch: Batch, group: SequenceGroup) -> Batch:
    """This rank's part of a packed batch; the layout of the whole goes with it."""
    total = batch.input_ids.shape[1]
    padding = -total % group.size
    ids, positions = (F.pad(x, (0, padding)) for x in (batch.input_ids, batch.position_ids))
    length = (total + padding) // group.size
    first = group.index * length
    mine = (batch.predictors_K >= first) & (batch.predictors_K < first + length)
    inputs, ref = batch.inputs, batch.inputs.ref_logprobs_K
    return replace(
        batch,
        input_ids=ids[:, first : first + length],
        position_ids=positions[:, first : first + length],
        predictors_K=batch.predictors_K[mine] - first,
        targets_K=batch.targets_K[mine],
        inputs=TokenInputs(
            sampler_logprobs_K=inputs.sampler_logprobs_K[mine],
            advantages_K=inputs.advantages_K[mine],
            weights_K=inputs.weights_K[mine],
            segments_K=inputs.segments_K[mine],
            num_segments=inputs.num_segments,
            ref_logprobs_K=None if ref is None else ref[mine],
            group=group,
        ),
        lags=LagInputs(lag_K=batch.lags.lag_K[mine], in_flight_K=batch.lags.in_flight_K[mine]),
        all_position_ids=positions,
    )


@dataclass(frozen=True)
class _Layout:
    """What attention must know of the batch under way."""

    mask_LT: Tensor
    """bool: which tokens of the whole each local token sees."""
    group: SequenceGroup | None


_layout: _Layout | None = None


def set_layout(position_ids: Tensor, all_position_ids: Tensor | None, group: SequenceGroup | None) -> None:
    """Announce the batch whose forward (and, with gradient checkpointing, backward) comes next.

    Args:
        position_ids: int64 [1, L] of this rank.
        all_position_ids: int64 [1, T] of the group; None = this rank has all tokens.
    """
    global _layout
    whole = position_ids if all_position_ids is None else all_position_ids
    assert whole.shape[0] == 1, "sequence parallelism needs packed batches"
    documents_T = (whole[0] == 0).cumsum(0)
    places_T = torch.arange(whole.shape[1], device=whole.device)
    length = position_ids.shape[1]
    first = group.index * length if group is not None and all_position_ids is not None else 0
    own = slice(first, first + length)
    mask_LT = (documents_T[own, None] == documents_T) & (places_T <= places_T[own, None])
    _layout = _Layout(mask_LT, group if all_position_ids is not None else None)


class _Gather(torch.autograd.Function):
    """Concatenate a tensor of all ranks of the group along dimension 2; gradients go back where they came from."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group, ctx.length = group, local.shape[2]
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size)]
        dist.all_gather(parts, local.contiguous(), group=group.group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group.group)
        return gradient[:, :, ctx.group.index * ctx.length : (ctx.group.index + 1) * ctx.length], None


def sequence_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: local queries [1, heads, L, D] see the keys and values of all ranks."""
    assert _layout is not None, "set_layout() comes before the forward pass"
    if _layout.group is not None:
        key, value = _Gather.apply(key, _layout.group), _Gather.apply(value, _layout.group)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_layout.mask_LT,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make the implementation known to transformers under the name ``ATTENTION``; it makes its own mask."""
    AttentionInterface.register(ATTENTION, sequence_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
