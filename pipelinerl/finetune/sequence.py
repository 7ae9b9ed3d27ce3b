"""Sequence parallelism: the ranks of a group share one micro-batch, and each holds a slice of its tokens.

A transformer computes each token independently except in attention. So each rank computes its slice, and attention
exchanges keys and values in a ring (``ring``). The rank that holds a token's predecessor computes the token's loss.
Sums over a sequence are taken over the group, and gradients are summed over all ranks.

Shapes: T tokens of the micro-batch, padded to a multiple of the group's size, and L = T / size tokens of a rank.
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.attention import prepared
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.ring import Ring, RingPlan, ring_attention
from pipelinerl.finetune.rl.tokens import LagInputs, SequenceGroup, TokenInputs
from pipelinerl.records.batches import NOT_ROUTED

ATTENTION = "pipelinerl_sequence"


def make_sequence_group(size: int) -> SequenceGroup | None:
    """Make this rank's group of ``size`` consecutive ranks. None for size 1. Collective over all ranks."""
    if size == 1:
        return None
    rank, mine = dist.get_rank(), None
    for first in range(0, dist.get_world_size(), size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            mine = SequenceGroup(group, rank - first, size)
            dist.barrier(group)  # NCCL: the first call on a group must be one of all its ranks
    return mine


def slice_batch(batch: Batch, group: SequenceGroup) -> Batch:
    """This rank's slice of a packed batch. ``documents`` still describes the whole batch, with its padding."""
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
        documents=(*(batch.documents or ()), *[1] * padding),
        routed_experts_NR=_slice_routing(batch.routed_experts_NR, padding, slice(first, first + length)),
    )


def _slice_routing(routed_NR: Tensor | None, padding: int, mine: slice) -> Tensor | None:
    return None if routed_NR is None else F.pad(routed_NR, (0, 0, 0, padding), value=NOT_ROUTED)[mine]


_ring: Ring | None = None


def set_layout(documents: tuple[int, ...], length: int, group: SequenceGroup | None) -> None:
    """Set the layout for the next forward pass and, with gradient checkpointing, its backward pass.

    Args:
        documents: lengths of all documents of the group's ranks, including padding.
        length: L of this rank. If it equals the sum of ``documents``, this rank holds the whole batch.
        group: ranks that share the batch.
    """
    global _ring
    shared = group if sum(documents) > length else None
    plan = RingPlan(
        first_tokens=tuple(accumulate(documents[:-1], initial=0)),
        length=length,
        size=shared.size if shared else 1,
        index=shared.index if shared else 0,
    )
    _ring = Ring(plan, shared)


def sequence_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Local queries [1, heads, L, D] see the keys and values of all ranks.

    Raises:
        ConfigError: the model needs dropout, a sliding window, a softcap or sinks, which the ring does not compute.
    """
    wanted = {"dropout": dropout or None} | {name: other.get(name) for name in ("sliding_window", "softcap", "s_aux")}
    refused = [name for name, value in wanted.items() if value is not None]
    if refused:
        raise ConfigError(
            f"finetune.seq_parallel is over 1, but the model's attention has {', '.join(refused)}, which it does not "
            "compute: set finetune.seq_parallel=1"
        )
    assert _ring is not None, "set_layout() comes before the forward pass"
    query, key, value, scale = prepared(query, key, value, scaling)
    output = ring_attention(query[0], key[0], value[0], _ring, scale)
    return output.transpose(0, 1)[None].contiguous(), None
