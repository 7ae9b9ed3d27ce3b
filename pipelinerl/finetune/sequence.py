"""Sequence parallelism: the ranks of a group share one micro-batch, and each holds two blocks of every document.

Attention gathers the keys and values of all ranks, one layer at a time (arXiv:2407.21783, §3.3.2). Of a document's 2R
blocks rank r holds r and 2R − 1 − r: under a causal mask these pairs cost the same. Neighbouring short documents are
cut like one. The rank that holds a token's predecessor computes the token's loss.

Shapes: T tokens of the micro-batch, padded to a multiple of R, and L = T / R tokens of a rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.rl.tokens import LagInputs, SequenceGroup
from pipelinerl.records.batches import NOT_ROUTED

LONG_DOCUMENT = 512
"""Tokens from which on a document is cut by itself. Attention of shorter ones costs little beside linear layers."""


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


def rows_of_ranks(lengths: Sequence[int], ranks: int) -> list[list[slice]]:
    """Rows of the micro-batch that each rank holds, ascending, L in all.

    Args:
        lengths: of all documents, with padding. Their sum T is a multiple of ``ranks``.
    """
    rows, held, start = [list[slice]() for _ in range(ranks)], [0] * ranks, 0
    for tokens in _units(lengths):
        size, rest = divmod(tokens, 2 * ranks)
        more = [rest // ranks] * ranks
        for rank in sorted(range(ranks), key=held.__getitem__)[: rest % ranks]:  # so that no rank is 2 tokens ahead
            more[rank] += 1
        blocks = [(rank, size + (more[rank] > 0)) for rank in range(ranks)]
        blocks += [(rank, size + (more[rank] > 1)) for rank in reversed(range(ranks))]
        for rank, block in blocks:
            rows[rank] += [slice(start, start + block)] if block else []
            held[rank] += block
            start += block
    return rows


def _units(lengths: Sequence[int]) -> Iterator[int]:
    """Tokens that are cut together: one long document, or neighbouring short ones."""
    for is_long, documents in groupby(lengths, LONG_DOCUMENT.__le__):
        tokens = list(documents)
        yield from tokens if is_long else [sum(tokens)]


@dataclass(frozen=True)
class DocumentSlice:
    """A run of a rank's queries, all of one document, and the keys that they see causally."""

    queries: int
    """Number of queries. The slices of a rank fill its L rows."""
    keys: slice
    """Rows of the micro-batch, from the document's first token to the slice's last."""


def slices_of(lengths: Sequence[int], group: SequenceGroup) -> list[DocumentSlice]:
    """This rank's slices of documents. ``lengths`` as in ``rows_of_ranks``."""
    bounds = list(pairwise(accumulate(lengths, initial=0)))
    cuts = (
        (start, max(start, rows.start), min(end, rows.stop))
        for rows in rows_of_ranks(lengths, group.size)[group.index]
        for start, end in bounds
    )
    return [DocumentSlice(last - first, slice(start, last)) for start, first, last in cuts if first < last]


def places_of_rows(lengths: Sequence[int], group: SequenceGroup) -> Tensor:
    """int64 [T]: place of each row of the micro-batch when the ranks' rows lie one after the other."""
    order = torch.cat([_indices(rows) for rows in rows_of_ranks(lengths, group.size)])
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def _indices(rows: Sequence[slice]) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in rows])


def gather_tokens(mine: Tensor, group: SequenceGroup) -> Tensor:
    """[…, L, D] of every rank → […, T, D], rank by rank. Collective, also its backward pass."""
    return _Gather.apply(mine, group)


class _Gather(torch.autograd.Function):
    """All-gather. Its backward pass sums every token's gradients over the ranks, in at least float32."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: SequenceGroup) -> Tensor:
        ctx.sharing, mine = group, mine.contiguous()
        ranks = [torch.empty_like(mine) for _ in range(group.size)]
        dist.all_gather(ranks, mine, group=group.group)
        return torch.cat(ranks, -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        ranks = [part.contiguous() for part in wide.chunk(ctx.sharing.size, -2)]
        mine = torch.empty_like(ranks[0])
        dist.reduce_scatter(mine, ranks, group=ctx.sharing.group)
        return mine.to(gradient.dtype), None


def slice_batch(batch: Batch, group: SequenceGroup) -> Batch:
    """This rank's tokens of a packed batch. ``documents`` still describes the whole batch, with its padding."""
    padding = -batch.input_ids.shape[1] % group.size
    documents = (*(batch.documents or ()), *[1] * padding)
    rows_L = _indices(rows_of_ranks(documents, group.size)[group.index])
    places_K = (places_of_rows(documents, group) - group.index * len(rows_L))[batch.predictors_K]
    mine = (places_K >= 0) & (places_K < len(rows_L))
    routed = batch.routed_experts_NR
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, padding))[:, rows_L],
        position_ids=F.pad(batch.position_ids, (0, padding))[:, rows_L],
        predictors_K=places_K[mine],
        targets_K=batch.targets_K[mine],
        inputs=replace(batch.inputs[mine], group=group),
        lags=LagInputs(lag_K=batch.lags.lag_K[mine], in_flight_K=batch.lags.in_flight_K[mine]),
        ends_S=None,
        cut_S=None,
        documents=documents,
        routed_experts_NR=None if routed is None else F.pad(routed, (0, 0, 0, padding), value=NOT_ROUTED)[rows_L],
    )
