"""Converts a ``MicroBatch`` record to tensors: its tokens, which of them are trained, and which tokens predict those.

Segments never attend to each other. A micro-batch has one of three layouts, all exact. *Packed* puts all segments one
after the other and restarts position ids at each. *Rows* puts one segment in each row, with padding at the end that
causal attention cannot see. *Shared* is packed, but computes a prefix that segments have in common once: behind the
segment that holds it lies what the others add, and their queries see the prefix's keys, too. None needs a mask of all
tokens. Rows cost less where segments are many, short and similar.

Shapes: T tokens, S segments, K trained tokens, B × L the layout's grid, E key rows.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelinerl.errors import RecordError
from pipelinerl.finetune.images import ImageInputs, ImageReader, read_images
from pipelinerl.finetune.rl.tokens import LagInputs, TokenInputs
from pipelinerl.records import MicroBatch
from pipelinerl.records.batches import NOT_ROUTED
from pipelinerl.records.check import check_micro_batch
from pipelinerl.rollouts import MASKED_TOKEN_ID as MASKED_TOKEN_ID  # domains written for PipelineRL import it from here

KERNEL_CALL = 1_000_000
"""Cost of one additional call of attention per layer, times ``tokens_per_attention_unit``."""


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """Positions, segments and versions of the trained tokens of a micro-batch."""

    positions_K: np.ndarray
    """int64, ascending: positions of the trained tokens in the micro-batch."""
    segments_K: np.ndarray
    """int64: index of the segment of each."""
    versions_K: np.ndarray
    """int64: weight version that sampled each."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Input of one forward and backward pass."""

    input_ids: Tensor
    """int64 [B, L]"""
    position_ids: Tensor
    """int64 [B, L], or [3, B, L] where images have positions of time, height and width"""
    predictors_K: Tensor
    """int64: flat grid index of the token before each trained token, whose hidden state predicts the trained one."""
    targets_K: Tensor
    """int64: ids of the trained tokens."""
    inputs: TokenInputs
    lags: LagInputs
    segment_rewards_S: Tensor
    num_tokens: int
    """T"""
    num_shared: int = 0
    """Tokens among them that are not computed, because another segment holds them."""
    ends_S: Tensor | None = None
    """int64: flat grid index of each segment's last trained token. None: no value head, or ranks share segments."""
    cut_S: Tensor | None = None
    """bool: whether the server cut the segment's last answer for its length. None: as ``ends_S``."""
    documents: tuple[int, ...] | None = None
    """Lengths of the packed documents of all ranks that share this micro-batch. None: each row is one document."""
    keys: tuple[int, ...] | None = None
    """Keys that each document sees, with those of its prefix in other documents. None: its own alone."""
    key_rows_E: Tensor | None = None
    """int64: rows of these keys, document by document."""
    routed_experts_NR: Tensor | None = None
    """int16 [B · L, layers · experts per token]: the server's choice for each token of the grid. −1 = not known."""
    images: ImageInputs | None = None
    """None: the batch is text alone."""

    @property
    def num_trained(self) -> int:
        return self.targets_K.shape[0]

    def to(self, device: torch.device) -> "Batch":
        """Copy from the host to ``device`` without waiting for it, so that it overlaps with computation."""
        return _moved(self, device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the host to ``device``. Only a copy from pinned memory does not wait for it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return to_device(value, device)
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    if not isinstance(value, (Batch, TokenInputs, LagInputs, ImageInputs)):
        return value
    return replace(value, **{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})


def index_tokens(record: MicroBatch) -> TokenIndex:
    """Find the trained tokens of a checked ``record``."""
    spans = record.spans.astype(np.int64)
    lengths = spans[:, 1] - spans[:, 0]
    offsets = np.cumsum(lengths) - lengths
    positions = np.repeat(spans[:, 0] - offsets, lengths) + np.arange(lengths.sum())
    ends = np.cumsum(record.segment_lengths.astype(np.int64))
    segments = np.searchsorted(ends, positions, side="right")
    return TokenIndex(positions_K=positions, segments_K=segments, versions_K=np.repeat(spans[:, 2], lengths))


def check_record(record: MicroBatch, vocab_size: int, max_lag_steps: int | None) -> TokenIndex:
    """Check that ``record`` may be trained, and find its trained tokens.

    Args:
        vocab_size: token ids must be below it.
        max_lag_steps: largest lag of a trained token. None: no bound.
    Raises:
        RecordError: the record is not valid, too old, or trains a first token. The message names the sample.
    """
    check_micro_batch(record, vocab_size=vocab_size)
    index = index_tokens(record)
    starts = np.concatenate([[0], np.cumsum(record.segment_lengths)[:-1]])
    unpredicted = index.positions_K == starts[index.segments_K]
    if unpredicted.any():
        sample = record.sequence_ids[index.segments_K[unpredicted.argmax()]]
        raise RecordError(f"{sample}: its first token is marked as trained, but nothing predicts it")
    lag_K = record.step - index.versions_K
    if max_lag_steps is not None and len(lag_K) and lag_K.max() > max_lag_steps:
        sample = record.sequence_ids[index.segments_K[lag_K.argmax()]]
        raise RecordError(f"{sample}: lag {lag_K.max()} exceeds max_lag_steps={max_lag_steps} in step {record.step}")
    return index


@dataclass(frozen=True, kw_only=True)
class GridLayout:
    """Where the tokens of a micro-batch lie in the grid that the model computes."""

    flat_T: np.ndarray
    """int64: flat grid index of each token. Tokens of a shared prefix have one index."""
    grid: tuple[int, int]
    position_ids: np.ndarray
    """int64, in the grid's shape"""
    documents: tuple[int, ...] | None = None
    """As in `Batch`."""
    keys: tuple[int, ...] | None = None
    key_rows_E: np.ndarray | None = None

    def cost(self, tokens_per_attention_unit: int, dense_mask: bool = False) -> int:
        """Cost of a layer, in attentions of one token to one other.

        A token costs ``tokens_per_attention_unit`` in the linear layers, plus the length that it attends over. In a
        pack with ``dense_mask`` this is the whole pack. Without it, this is the token's document and twice the shared
        prefix, as causal attention skips half of a document alone. Each document costs one more call of the kernel.
        """
        size = self.grid[0] * self.grid[1]
        linear = size * tokens_per_attention_unit
        if self.documents is None or dense_mask:
            return linear + size * self.grid[1]
        queries, keys = np.array(self.documents), np.array(self.keys or self.documents)
        calls = len(queries) * (KERNEL_CALL // max(tokens_per_attention_unit, 1))
        return linear + int((queries * (2 * keys - queries)).sum()) + calls


def _within(lengths: np.ndarray) -> np.ndarray:
    """int64 [T]: place of each token in its segment."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def packed(segment_lengths: np.ndarray) -> GridLayout:
    """All segments one after the other."""
    lengths = segment_lengths.astype(np.int64)
    within = _within(lengths)
    return GridLayout(
        flat_T=np.arange(len(within)),
        grid=(1, len(within)),
        position_ids=within[None],
        documents=tuple(lengths.tolist()),
    )


def in_rows(segment_lengths: np.ndarray) -> GridLayout:
    """One segment per row."""
    lengths = segment_lengths.astype(np.int64)
    grid = (len(lengths), int(lengths.max()))
    flat_T = np.repeat(np.arange(len(lengths)) * grid[1], lengths) + _within(lengths)
    return GridLayout(flat_T=flat_T, grid=grid, position_ids=np.broadcast_to(np.arange(grid[1]), grid))


def with_shared_prefixes(segment_lengths: np.ndarray, order_S: np.ndarray, shared_S: np.ndarray) -> GridLayout:
    """Segments in lexicographic order, each without the prefix that the one before it has.

    Args:
        segment_lengths: int32 [S].
        order_S, shared_S: of ``sort_by_prefix``.
    """
    lengths = segment_lengths.astype(np.int64)
    rows_S = np.split(np.empty(lengths.sum(), dtype=np.int64), np.cumsum(lengths)[:-1])
    num_rows, before, documents, keys, seen = 0, -1, [], [], []
    for segment, shared in zip(order_S.tolist(), shared_S.tolist(), strict=True):
        added = int(lengths[segment]) - shared
        rows_S[segment][:shared] = rows_S[before][:shared]
        rows_S[segment][shared:] = np.arange(num_rows, num_rows + added)
        num_rows, before = num_rows + added, segment
        if added:
            documents.append(added)
            keys.append(int(lengths[segment]))
            seen.append(rows_S[segment])
    flat_T = np.concatenate(rows_S)
    positions = np.empty((1, num_rows), dtype=np.int64)
    positions[0, flat_T] = _within(lengths)
    return GridLayout(
        flat_T=flat_T,
        grid=(1, num_rows),
        position_ids=positions,
        documents=tuple(documents),
        keys=tuple(keys),
        key_rows_E=np.concatenate(seen),
    )


def _tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
    """Arrays from a stream are read-only, which torch does not support."""
    return torch.as_tensor(np.require(array, requirements=("C", "W")), dtype=dtype)


def _on_grid(routed_TR: np.ndarray, flat: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    routed_NR = np.full((grid[0] * grid[1], routed_TR.shape[1]), NOT_ROUTED, dtype=np.int16)
    routed_NR[flat] = routed_TR
    return routed_NR


def _lags(record: MicroBatch, index: TokenIndex) -> LagInputs:
    last_version_S = np.zeros(len(record.segment_lengths), dtype=np.int64)
    np.maximum.at(last_version_S, index.segments_K, index.versions_K)
    return LagInputs(
        lag_K=_tensor(record.step - index.versions_K),
        in_flight_K=_tensor(last_version_S[index.segments_K] - index.versions_K),
    )


def _last_trained(index: TokenIndex, flat: np.ndarray, num_segments: int) -> np.ndarray:
    """int64 [S]: flat grid index of each segment's last trained token, 0 where it has none."""
    ends_S = np.zeros(num_segments, dtype=np.int64)
    ends_S[index.segments_K] = flat[index.positions_K]  # positions ascend, so the last one stays
    return ends_S


def to_batch(
    record: MicroBatch,
    index: TokenIndex,
    *,
    layout: GridLayout,
    pad_id: int = 0,
    float_dtype: torch.dtype = torch.float32,
    reader: ImageReader | None = None,
) -> Batch:
    """Convert ``record`` to tensors on the host.

    Args:
        layout: of the record's tokens.
        pad_id: token id of the padding in rows.
        float_dtype: of log-probs, advantages, weights and rewards.
        reader: makes the vision tower's inputs. None: the model takes no images.
    Raises:
        RecordError: an image cannot be read as the server read it.
    """
    flat, grid = layout.flat_T, layout.grid
    images, positions = read_images(record, reader, flat, layout.position_ids)
    input_ids = np.full(grid[0] * grid[1], pad_id, dtype=np.int64)
    input_ids[flat] = record.token_ids

    at = index.positions_K
    ref, teacher, routed = record.ref_logprobs, record.teacher_logprobs, record.routed_experts
    imitated = record.supervised
    lags = _lags(record, index)
    returned = record.rewards[index.segments_K] if record.cut is None else record.advantages[at]
    return Batch(
        input_ids=_tensor(input_ids.reshape(grid)),
        position_ids=_tensor(positions),
        predictors_K=_tensor(flat[at - 1]),
        targets_K=_tensor(record.token_ids[at]),
        inputs=TokenInputs(
            sampler_logprobs_K=_tensor(record.logprobs[at], float_dtype),
            advantages_K=_tensor(record.advantages[at], float_dtype),
            weights_K=_tensor(record.segment_weights[index.segments_K], float_dtype),
            segments_K=_tensor(index.segments_K),
            num_segments=len(record.segment_lengths),
            rewards_K=_tensor(returned, float_dtype),
            lag_K=lags.lag_K,
            supervised_K=None if imitated is None else _tensor(imitated[index.segments_K], torch.bool),
            ref_logprobs_K=None if ref is None else _tensor(ref[at], float_dtype),
            teacher_logprobs_K=None if teacher is None else _tensor(teacher[at], float_dtype),
            teacher_top_ids_KJ=None if record.teacher_top_ids is None else _tensor(record.teacher_top_ids),
            teacher_top_logprobs_KJ=(
                None if record.teacher_top_logprobs is None else _tensor(record.teacher_top_logprobs, float_dtype)
            ),
        ),
        lags=lags,
        segment_rewards_S=_tensor(record.rewards, float_dtype),
        num_tokens=len(record.token_ids),
        ends_S=None if record.cut is None else _tensor(_last_trained(index, flat, len(record.segment_lengths))),
        cut_S=None if record.cut is None else _tensor(record.cut, torch.bool),
        num_shared=0 if layout.keys is None else len(record.token_ids) - grid[1],
        documents=layout.documents,
        keys=layout.keys,
        key_rows_E=None if layout.key_rows_E is None else _tensor(layout.key_rows_E),
        routed_experts_NR=None if routed is None else _tensor(_on_grid(routed, flat, grid), torch.int16),
        images=images,
    )
