"""Ring attention over the slices of a packed micro-batch. Exact and causal: documents never see each other.

Rank i of a group holds tokens i·L … (i+1)·L − 1. In hop s it receives keys and values from the rank s places before it
and merges the attention over them by log-sum-exp. Gradients take the reverse route (arXiv:2310.01889). Only queries of
a document that began on an earlier rank need other ranks' keys, and they need only the keys of that document. Nothing
else is sent, and the number of hops is the largest number of slice boundaries that a document crosses. In a hop every
such query sees every such key, so no mask is needed.

Shapes: L tokens of a rank, H query heads, G key-value heads, D head size. Tensors are [heads, tokens, D].
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.finetune.rl.tokens import SequenceGroup

DocumentLengths = Sequence[int] | None
"""Lengths of documents, each attending causally to itself. None: every query sees every key."""


@dataclass(frozen=True)
class RingPlan:
    """Which queries see which keys. Ranks of a group differ only in ``index``."""

    first_tokens: tuple[int, ...]
    """Positions of the documents' first tokens in the whole micro-batch, ascending from 0."""
    length: int
    """L"""
    size: int = 1
    index: int = 0

    @cached_property
    def documents(self) -> tuple[int, ...]:
        """Lengths of the documents in this rank's slice. Documents are cut at its ends."""
        start, end = self.index * self.length, (self.index + 1) * self.length
        cuts = [start, *(place for place in self.first_tokens if start < place < end), end]
        return tuple(after - before for before, after in pairwise(cuts))

    @cached_property
    def num_hops(self) -> int:
        """Number of hops, the same for the whole group."""
        return max(rank - self._begun(rank) // self.length for rank in range(self.size))

    @cached_property
    def num_looking_back(self) -> int:
        """Number of this rank's queries that see other ranks' keys. They are its first queries."""
        return self.documents[0] if self._begun(self.index) < self.index * self.length else 0

    def num_keys(self, owner: int, reader: int) -> int:
        """Number of ``owner``'s keys that ``reader`` needs. They are its last keys. 0 if either rank does not exist."""
        if not 0 <= owner < reader < self.size:
            return 0
        return max((owner + 1) * self.length - max(self._begun(reader), owner * self.length), 0)

    def _begun(self, rank: int) -> int:
        """Position where the document of the rank's first token begins."""
        return self.first_tokens[bisect_right(self.first_tokens, rank * self.length) - 1]


@dataclass(frozen=True)
class Ring:
    """A plan and the ranks that execute it."""

    plan: RingPlan
    group: SequenceGroup | None = None
    """None: this rank holds the whole micro-batch."""

    def bring(self, hop: int, kv: Tensor) -> "_Transfer":
        """Start to fetch keys and values [2, G, n, D] from the rank ``hop`` places before, and to send from ``kv``."""
        me = self.plan.index
        leaving = kv[:, :, kv.shape[2] - self.plan.num_keys(me, me + hop) :]
        arriving = kv.new_empty(2, kv.shape[1], self.plan.num_keys(me - hop, me), kv.shape[3])
        return _Transfer(self.group, leaving, me + hop, arriving, me - hop)

    def take_back(self, hop: int, gradient: Tensor) -> "_Transfer":
        """Start to return the gradient of what ``hop`` fetched, and to fetch the gradient of what it sent."""
        me = self.plan.index
        arriving = gradient.new_empty(2, gradient.shape[1], self.plan.num_keys(me, me + hop), gradient.shape[3])
        return _Transfer(self.group, gradient, me - hop, arriving, me + hop)


class _Transfer:
    """One tensor being sent and one being received. Empty tensors are not transferred."""

    def __init__(self, group: SequenceGroup | None, leaving: Tensor, to: int, arriving: Tensor, source: int):
        self._leaving, self._arriving = leaving.contiguous(), arriving
        sides = ((dist.isend, self._leaving, to), (dist.irecv, arriving, source))
        travelling = [side for side in sides if side[1].numel()]
        self._works = []
        if travelling:
            assert group is not None, "other ranks' keys without a group"
            operations = [dist.P2POp(go, it, group=group.group, group_peer=peer) for go, it, peer in travelling]
            self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arriving


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float) -> Tensor:
    """Attention of this rank's queries over the whole micro-batch. Collective over the ring's group.

    Args:
        query: [H, L, D].
        key, value: [G, L, D] of this rank. H is a multiple of G.
        ring: the micro-batch's plan and the group.
        scale: factor of the scores.
    Returns:
        [H, L, D] in the dtype of ``query``.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _RingAttention.apply(query, key, value, ring, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float) -> Tensor:
        kernel, plan, kv = _choose_kernel(query), ring.plan, torch.stack([key, value])
        transfer = ring.bring(1, kv)
        out, lse = kernel.forward(query, key, value, scale, plan.documents)
        for hop in range(1, plan.num_hops + 1):
            brought = transfer.wait()
            transfer = ring.bring(hop + 1, kv)
            if brought.numel():
                _merge(out, lse, *kernel.forward(query[:, : plan.num_looking_back], *brought, scale, None))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, kv, out, lse)
        ctx.kernel, ctx.ring, ctx.scale = kernel, ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Each block's gradient follows from the log-sum-exp over all blocks, as in Ring and FlashAttention."""
        query, kv, out, lse = ctx.saved_tensors
        plan, scale = ctx.ring.plan, ctx.scale
        transfer = ctx.ring.bring(1, kv)
        d_query, d_kv = ctx.kernel.backward(gradient, query, *kv, out, lse, scale, plan.documents)
        first = slice(plan.num_looking_back)
        for hop in range(1, plan.num_hops + 1):
            brought = transfer.wait()
            transfer = ctx.ring.bring(hop + 1, kv)
            d_brought = d_kv.new_empty(brought.shape)
            if brought.numel():
                d_first, d_brought = ctx.kernel.backward(
                    gradient[:, first], query[:, first], *brought, out[:, first], lse[:, first], scale, None
                )
                d_query[:, first] += d_first
            returned = ctx.ring.take_back(hop, d_brought).wait()
            d_kv[:, :, d_kv.shape[2] - returned.shape[2] :] += returned
        d_key, d_value = d_kv.to(kv.dtype)
        return d_query.to(query.dtype), d_key, d_value, None, None


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge attention over further keys into the first rows of ``out`` and ``lse``, in place."""
    old_out, old_lse = out[:, : new_lse.shape[1]], lse[:, : new_lse.shape[1]]
    both = torch.logaddexp(old_lse, new_lse)
    old_out.mul_((old_lse - both).exp()[..., None]).add_(new_out * (new_lse - both).exp()[..., None])
    old_lse.copy_(both)


# Two kernels with the same two functions. `forward` returns the output [H, q, D] in at least float32 and the scores'
# log-sum-exp [H, q]. `backward` returns the gradients of the queries [H, q, D] and of keys and values [2, G, k, D].


def _choose_kernel(query: Tensor) -> SimpleNamespace:
    """torch's FlashAttention for half precision on CUDA, plain matrix products for everything else."""
    return FLASH if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else EXACT


def _blocks(num_queries: int, num_keys: int, documents: DocumentLengths) -> Iterator[tuple[slice, slice]]:
    if documents is None:
        yield slice(num_queries), slice(num_keys)
        return
    for start, end in pairwise(accumulate(documents, initial=0)):
        yield slice(start, end), slice(start, end)


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """[G, H / G, q, k]"""
    scores = query @ key.mT * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future, -torch.inf)
    return scores


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _exact_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, documents: DocumentLengths
) -> tuple[Tensor, Tensor]:
    query = _widened(query.unflatten(0, (key.shape[0], -1)))
    key, value = _widened(key[:, None]), _widened(value[:, None])
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:3])
    for rows, columns in _blocks(query.shape[2], key.shape[2], documents):
        scores = _scores(query[:, :, rows], key[:, :, columns], scale, documents is not None)
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = (scores - lse[:, :, rows, None]).exp_() @ value[:, :, columns]
    return out.flatten(0, 1), lse.flatten(0, 1)


def _exact_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    documents: DocumentLengths,
) -> tuple[Tensor, Tensor]:
    heads = (key.shape[0], -1)
    query, gradient, out = (_widened(x.unflatten(0, heads)) for x in (query, gradient, out))
    key, value, lse = _widened(key[:, None]), _widened(value[:, None]), lse.unflatten(0, heads)
    d_query, d_kv = torch.zeros_like(query), query.new_zeros(2, heads[0], *key.shape[2:])
    shared = (gradient * out).sum(-1, keepdim=True)
    for rows, columns in _blocks(query.shape[2], key.shape[2], documents):
        scores = _scores(query[:, :, rows], key[:, :, columns], scale, documents is not None)
        weights = (scores - lse[:, :, rows, None]).exp_()
        d_scores = weights * (gradient[:, :, rows] @ value[:, :, columns].mT - shared[:, :, rows]) * scale
        d_query[:, :, rows] = d_scores @ key[:, :, columns]
        d_kv[0, :, columns] = (d_scores.mT @ query[:, :, rows]).sum(1)
        d_kv[1, :, columns] = (weights.mT @ gradient[:, :, rows]).sum(1)
    return d_query.flatten(0, 1), d_kv


def _flash_bounds(
    query: Tensor, key: Tensor, documents: DocumentLengths
) -> tuple[Tensor, Tensor, int, int, float, bool]:
    """Arguments of torch's variable-length kernels: cumulative lengths, longest query and key, dropout, causal."""
    lengths = [[x.shape[1]] if documents is None else list(documents) for x in (query, key)]
    ends = [torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=query.device) for x in lengths]
    return ends[0], ends[1], max(lengths[0]), max(lengths[1]), 0.0, documents is not None


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, documents: DocumentLengths
) -> tuple[Tensor, Tensor]:
    tokens_first = [x.transpose(0, 1).contiguous() for x in (query, key, value)]
    bounds = _flash_bounds(query, key, documents)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(*tokens_first, *bounds, False, scale=scale)
    return out.transpose(0, 1).float(), lse


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    documents: DocumentLengths,
) -> tuple[Tensor, Tensor]:
    tokens_first = [x.transpose(0, 1).contiguous() for x in (gradient, query, key, value, out)]
    bounds = _flash_bounds(query, key, documents)
    no_dropout = (torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device))
    grads = torch.ops.aten._flash_attention_backward(*tokens_first, lse.contiguous(), *bounds, *no_dropout, scale=scale)
    d_query, d_key, d_value = (x.transpose(0, 1).float() for x in grads)
    return d_query, torch.stack([d_key, d_value])


EXACT = SimpleNamespace(forward=_exact_forward, backward=_exact_backward)
FLASH = SimpleNamespace(forward=_flash_forward, backward=_flash_backward)
