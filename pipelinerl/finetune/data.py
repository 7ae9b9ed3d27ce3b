"""From a ``MicroBatch`` record to tensors: which tokens are trained, what predicts them, who may attend to whom.

Segments never attend to each other. A micro-batch is laid out in one of two exact ways: *packed*, all segments one
after the other with restarting position ids (attention kernels find the boundaries there), or *rows*, one segment per
row with free tokens at the end that causal attention cannot see. Neither needs an attention mask. ``rows`` wins where
segments are of similar length, since packed attention without a variable-length kernel costs the square of the sum.

Shapes: T tokens, S segments, K trained tokens, B × L the layout's grid.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipelinerl.errors import RecordError
from pipelinerl.finetune.rl.diagnostics import LagInputs
from pipelinerl.finetune.rl.losses import TokenInputs
from pipelinerl.records import MicroBatch


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """Where the trained tokens of a micro-batch are, as numpy arrays."""

    positions_K: np.ndarray
    """int64, ascending: positions of the trained tokens in the micro-batch."""
    segments_K: np.ndarray
    """int64: their segments."""
    versions_K: np.ndarray
    """int64: the weight versions that sampled them."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward-backward pass, on the device."""

    input_ids: Tensor
    """int64 [B, L]"""
    position_ids: Tensor
    """int64 [B, L]"""
    predictors_K: Tensor
    """int64: flat grid index of the token before each trained one; its hidden state predicts the trained token."""
    targets_K: Tensor
    """int64: trained token ids."""
    inputs: TokenInputs
    lags: LagInputs
    segment_rewards_S: Tensor
    num_tokens: int
    """T"""

    @property
    def num_trained(self) -> int:
        return self.targets_K.shape[0]


def index_tokens(record: MicroBatch) -> TokenIndex:
    """Trained tokens of ``record``; refuses spans that no gradient can come from."""
    total = len(record.token_ids)
    spans = record.spans.reshape(-1, 3).astype(np.int64)
    starts, ends = spans[:, 0], spans[:, 1]
    if len(spans) and (
        starts.min() < 0 or ends.max() > total or (ends <= starts).any() or (starts[1:] < ends[:-1]).any()
    ):
        raise RecordError(f"{_where(record)}: spans must be ascending, disjoint, non-empty and inside 0..{total}")
    lengths = ends - starts
    offsets = np.cumsum(lengths) - lengths
    positions = np.repeat(starts - offsets, lengths) + np.arange(lengths.sum())
    ends_of_segments = np.cumsum(record.segment_lengths.astype(np.int64))
    segments = np.searchsorted(ends_of_segments, positions, side="right")
    first = np.concatenate([[0], ends_of_segments[:-1]]) if len(ends_of_segments) else np.zeros(0, np.int64)
    if len(positions) and (positions == first[segments]).any():
        bad = segments[positions == first[segments]][0]
        raise RecordError(f"{record.sample_ids[bad]}: its first token is marked as trained, but nothing predicts it")
    return TokenIndex(positions_K=positions, segments_K=segments, versions_K=np.repeat(spans[:, 2], lengths))


def check_record(record: MicroBatch, index: TokenIndex, vocab_size: int, max_lag_steps: int | None) -> None:
    """Refuse what may not reach a gradient, naming the sample."""
    ends = np.cumsum(record.segment_lengths.astype(np.int64))
    if (int(ends[-1]) if len(ends) else 0) != len(record.token_ids):
        raise RecordError(
            f"{_where(record)}: segment lengths sum to {ends[-1:]}, token_ids has {len(record.token_ids)}"
        )
    ids = record.token_ids
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        position = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        sample = record.sample_ids[int(np.searchsorted(ends, position, side="right"))]
        raise RecordError(f"{sample}: token id {ids[position]} is outside the vocabulary 0..{vocab_size - 1}")
    columns = {"logprob": record.logprobs, "advantage": record.advantages, "reference logprob": record.ref_logprobs}
    for name, column in columns.items():
        if column is not None:
            _check_finite(record, index, name, column[index.positions_K])
    _check_finite(record, index, "weight", record.segment_weights[index.segments_K])
    lag_K = record.step - index.versions_K
    if len(lag_K) and lag_K.min() < 0:
        sample = record.sample_ids[index.segments_K[lag_K.argmin()]]
        raise RecordError(f"{sample}: sampled by version {index.versions_K.max()}, but trained in step {record.step}")
    if max_lag_steps is not None and len(lag_K) and lag_K.max() > max_lag_steps:
        sample = record.sample_ids[index.segments_K[lag_K.argmax()]]
        raise RecordError(f"{sample}: lag {lag_K.max()} exceeds max_lag_steps={max_lag_steps} in step {record.step}")


def _check_finite(record: MicroBatch, index: TokenIndex, name: str, values_K: np.ndarray) -> None:
    finite = np.isfinite(values_K)
    if not finite.all():
        at = int(np.argmin(finite))
        sample = record.sample_ids[index.segments_K[at]]
        raise RecordError(f"{sample}: {name} {values_K[at]} at a trained token may not reach a gradient")


def _where(record: MicroBatch) -> str:
    return f"micro-batch {record.index} of step {record.step} ({', '.join(record.sample_ids[:3])}, …)"


def prefers_rows(segment_lengths: np.ndarray, tokens_per_attention_unit: int) -> bool:
    """Whether one segment per row costs less than packing.

    A token costs ``tokens_per_attention_unit`` in the linear layers (in units of attention to one token) plus the
    length it attends over.
    """
    total, longest = int(segment_lengths.sum()), int(segment_lengths.max())
    grid = len(segment_lengths) * longest
    return grid * (tokens_per_attention_unit + longest) < total * (tokens_per_attention_unit + total)


def to_batch(
    record: MicroBatch,
    index: TokenIndex,
    device: torch.device,
    *,
    rows: bool,
    pad_id: int = 0,
    float_dtype: torch.dtype = torch.float32,
) -> Batch:
    """Tensors of ``record`` in the chosen layout."""
    lengths = record.segment_lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    if rows:
        width = int(lengths.max())
        flat = np.repeat(np.arange(len(lengths)) * width, lengths) + within
        grid = (len(lengths), width)
        positions = np.broadcast_to(np.arange(width), grid)
    else:
        flat, grid, positions = np.arange(len(within)), (1, len(within)), within[None]
    input_ids = np.full(grid[0] * grid[1], pad_id, dtype=np.int64)
    input_ids[flat] = record.token_ids

    def put(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype).to(device, non_blocking=True)

    at = index.positions_K
    ref = record.ref_logprobs
    last_version_S = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(last_version_S, index.segments_K, index.versions_K)
    return Batch(
        input_ids=put(input_ids.reshape(grid)),
        position_ids=put(positions),
        predictors_K=put(flat[at - 1]),
        targets_K=put(record.token_ids[at]),
        inputs=TokenInputs(
            sampler_logprobs_K=put(record.logprobs[at], float_dtype),
            advantages_K=put(record.advantages[at], float_dtype),
            weights_K=put(record.segment_weights[index.segments_K], float_dtype),
            segments_K=put(index.segments_K),
            num_segments=len(lengths),
            ref_logprobs_K=None if ref is None else put(ref[at], float_dtype),
        ),
        lags=LagInputs(
            lag_K=put(record.step - index.versions_K),
            in_flight_K=put(last_version_S[index.segments_K] - index.versions_K),
        ),
        segment_rewards_S=put(record.rewards, float_dtype),
        num_tokens=len(record.token_ids),
    )
