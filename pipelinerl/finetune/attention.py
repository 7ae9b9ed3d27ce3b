"""Causal attention over packed documents that never builds a mask of all tokens by all tokens.

``announce`` sets the documents of the next forward pass. Each document attends only to itself. Softcaps and attention
sinks are computed from the scores of one block of queries at a time, because no fused kernel of torch supports them.

Shapes: B rows, H query heads, G key-value heads, L tokens of a row or document, D head size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.data import to_device
from pipelinerl.finetune.rl.tokens import SequenceGroup
from pipelinerl.finetune.sequence import gather_tokens, places_of_rows, slices_of

PACKED = "pipelinerl_packed"
"""The name of this implementation in transformers."""
QUERY_BLOCK = 512
"""Queries per block where scores or a mask are materialised."""
VARLEN_HEAD_SIZE = 256
"""Largest head size that torch's variable-length kernel takes."""


@dataclass(frozen=True)
class Documents:
    """Documents that lie one after the other in a row of tokens, or a rank's slices of them."""

    lengths: tuple[int, ...]
    """Queries of each."""
    keys: tuple[int, ...]
    """Keys of each. The last query is at the place of the last key."""
    device: torch.device
    group: SequenceGroup | None = None
    """Ranks that hold the other slices. None: this rank has whole documents."""
    key_rows: Tensor | None = None
    """int64: where these keys are in the row, or among those of all ranks. None: the keys of the row as they lie."""

    @classmethod
    def sliced(cls, lengths: tuple[int, ...], device: torch.device, group: SequenceGroup) -> "Documents":
        """This rank's slices of documents of these lengths."""
        slices = slices_of(lengths, group)
        places = places_of_rows(lengths, group)
        rows = to_device(torch.cat([places[one.keys] for one in slices]), device)
        keys = tuple(one.keys.stop - one.keys.start for one in slices)
        return cls(tuple(one.queries for one in slices), keys, device, group, rows)

    def seen(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[1, G, Σ keys, D]: this rank's and the other ranks' keys and values, document by document. Collective."""
        if self.key_rows is None:
            return key, value
        if self.group is None:
            return key.index_select(2, self.key_rows), value.index_select(2, self.key_rows)
        everyone = gather_tokens(torch.cat([key, value], -1), self.group).index_select(2, self.key_rows)
        key, value = everyone.split([key.shape[-1], value.shape[-1]], -1)
        return key, value

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """int32 [S + 1] for queries and keys: cumulative lengths, starting with 0."""
        runs = (self.lengths, self.keys)
        own, seen = (to_device(torch.tensor([0, *accumulate(run)], dtype=torch.int32), self.device) for run in runs)
        return own, seen


@dataclass(frozen=True, kw_only=True)
class _Scoring:
    """How attention scores are turned into weights."""

    scale: float
    window: int | None
    """Keys that a query sees, including its own. None: all keys up to its own."""
    softcap: float | None
    sinks_H: Tensor | None
    """Logit of one additional key per head, whose value is 0."""
    dropout: float

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks_H is None


_announced: Documents | None = None


def announce(
    lengths: tuple[int, ...] | None,
    device: torch.device,
    group: SequenceGroup | None = None,
    keys: tuple[int, ...] | None = None,
    key_rows: Tensor | None = None,
) -> None:
    """Set the documents of the next forward pass and, with gradient checkpointing, of its backward pass.

    Args:
        lengths: lengths of the documents that fill the only row. None: each row is one document.
        group: ranks among which the row is cut. None: this rank has the whole row.
        keys: keys of each document, with those that it shares. None: its own.
        key_rows: int64 [Σ keys], their rows.
    """
    global _announced
    _announced = None
    if lengths is not None and group is not None:
        _announced = Documents.sliced(lengths, device, group)
    elif lengths is not None and keys is not None:
        _announced = Documents(lengths, keys, device, None, key_rows)
    elif lengths is not None and len(lengths) > 1:
        _announced = Documents(lengths, lengths, device)


def document_lengths(position_ids: Tensor) -> tuple[int, ...] | None:
    """Lengths of the documents in positions [1, L], which restart at 0. None for several rows. Waits for the device."""
    if position_ids.shape[0] > 1:
        return None
    starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
    assert starts[:1] == [0], "a packed batch begins with a document"
    return tuple(end - start for start, end in pairwise([*starts, position_ids.shape[1]]))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: queries [B, H, L, D], keys and values [B, G, L, D], result [B, L, H, D].

    Args:
        module: the layer that calls.
        attention_mask: must be None.
        scaling: factor of the scores. None: D^-½.
        sliding_window: keys that a query sees, including its own. None: all.
        softcap: bound of the scores. None: none.
        s_aux: [H] attention sinks.
        is_causal: must not be False. None: as ``module.is_causal`` says.
    Raises:
        ConfigError: the model passes a mask of its own or is not causal.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or not causal or query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"finetune.attn_implementation: packed attention is causal over whole documents, which "
            f"{type(module).__name__} is not; use sdpa or eager"
        )
    query, key, value, scale = _prepared(query, key, value, scaling)
    scoring = _Scoring(scale=scale, window=sliding_window, softcap=softcap, sinks_H=s_aux, dropout=dropout)
    if _announced is None:
        return _attend(query, key, value, scoring).transpose(1, 2).contiguous(), None
    key, value = _announced.seen(key, value)
    attend = _varlen if _has_kernel(query, value, scoring) else _attend_documents
    output = attend(query, key, value, scoring, _announced)
    return output.transpose(1, 2).contiguous(), None


def register_attention(name: str, attention: Callable[..., tuple[Tensor, None]]) -> None:
    """Register ``attention`` in transformers under ``name``."""
    # Without a function of masks transformers makes none, and does not wait for the device to look at the positions.
    AttentionInterface.register(name, attention)


def _prepared(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries, keys and values in the autocast dtype, if any, and the scale of the scores (None: D^-½)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not torch.is_autocast_enabled(query.device.type):
        return query, key, value, scale
    dtype = torch.get_autocast_dtype(query.device.type)  # rotary embedding leaves queries and keys in float32
    return query.to(dtype), key.to(dtype), value.to(dtype), scale


def _attend(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring) -> Tensor:
    """Attention of one document per row, or its last queries: [B, H, L, D], where D is the head size of the values."""
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    windowed = scoring.window is not None and scoring.window < key.shape[2]
    if scoring.is_plain and not windowed and before < length:
        # A causal square of keys² / 2 pairs is less than all queries × keys, which a mask computes.
        square = F.pad(query, (0, 0, before, 0)) if before else query
        return F.scaled_dot_product_attention(
            square, key, value, is_causal=True, scale=scoring.scale, dropout_p=scoring.dropout, enable_gqa=True
        )[:, :, before:]
    if not scoring.is_plain and scoring.dropout:
        raise ConfigError("model_path: attention with a softcap or sinks takes no dropout; set it to 0")
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        first = max(before + start - scoring.window + 1, 0) if scoring.window is not None else 0
        seen = slice(first, before + end)
        part = (query[:, :, start:end], key[:, :, seen], value[:, :, seen])
        if scoring.is_plain:
            blocks.append(_banded(*part, scoring))
        else:
            blocks.append(checkpoint(_from_scores, *part, scoring, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(blocks, 2)


def _attend_documents(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring, documents: Documents) -> Tensor:
    """Attention of the documents of one row: [1, H, L, D]. Neighbours of equal lengths are one batch."""
    kinds = groupby(zip(documents.lengths, documents.keys, strict=True))
    runs = [(queries, keys, len(list(run))) for (queries, keys), run in kinds]
    queries, keys = ([run[side] * run[2] for run in runs] for side in (0, 1))
    outputs = []
    # Split and not sliced: the gradient of each slice would be a tensor of the whole row.
    parts = (query.split(queries, 2), key.split(keys, 2), value.split(keys, 2))
    for (_, _, count), *part in zip(runs, *parts, strict=True):
        q, k, v = (tensor[0].unflatten(1, (count, -1)).transpose(0, 1) for tensor in part)
        outputs.append(_attend(q, k, v, scoring).transpose(0, 1).flatten(1, 2))
    return torch.cat(outputs, 1)[None]


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [q, k]: which keys each query sees. The last query has the position of the last key."""
    distance = torch.arange(num_queries, device=device)[:, None] - torch.arange(num_keys, device=device)[None]
    distance += num_keys - num_queries
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _banded(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring) -> Tensor:
    mask = _visible(query.shape[2], key.shape[2], scoring.window, query.device)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scoring.scale, dropout_p=scoring.dropout, enable_gqa=True
    )


def _from_scores(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring) -> Tensor:
    """Attention from explicit float32 scores, with softcap and sinks. The q queries are the last of the k tokens."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = (grouped @ key[:, :, None].mT).to(torch.promote_types(query.dtype, torch.float32)) * scoring.scale
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    visible = _visible(query.shape[2], key.shape[2], scoring.window, query.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    if scoring.sinks_H is not None:
        sinks = scoring.sinks_H.to(scores.dtype).view(1, key.shape[1], -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def _has_kernel(query: Tensor, value: Tensor, scoring: _Scoring) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and max(query.shape[-1], value.shape[-1]) <= VARLEN_HEAD_SIZE
        and scoring.is_plain
        and not scoring.dropout
    )


def _varlen(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring, documents: Documents) -> Tensor:
    """torch's kernel takes [L, H, D] and one head size, so values with smaller heads are padded."""
    from torch.nn.attention.varlen import varlen_attn

    size = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - size))
    window = (-1 if scoring.window is None else scoring.window - 1, 0)
    query_LHD, key_LGD, value_LGD = (x[0].transpose(0, 1) for x in (query, key, value))
    grouped: dict[str, Any] = {"enable_gqa": True}
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11 wants a key head per query head
        key_LGD, value_LGD = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key_LGD, value_LGD))
        grouped = {}
    output = varlen_attn(
        query_LHD,
        key_LGD,
        value_LGD,
        *documents.ends,
        max(documents.lengths),
        max(documents.keys),
        scale=scoring.scale,
        window_size=window,
        **grouped,
    )
    assert isinstance(output, Tensor), "no log-sum-exp was asked for"
    return output.transpose(0, 1)[None, ..., :size]
