"""Turns an optimizer batch into micro-batches for each rank: weights, packing, and concatenated arrays. No I/O.

All trained tokens of a rollout have the same weight in the batch's loss `Σ weight · loss_t`, which does not depend on
packing (docs/algorithms.md §4). No denominator counts tokens of a rollout or text of weight zero.

Shapes: T tokens of a micro-batch, S segments, R spans, N samples (rollouts) of the optimizer batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from pipelinerl.config.objectives import SCALED_BY_BATCH
from pipelinerl.preprocess.advantages import batch_std_scale
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.packing import plan_packed, plan_shared, plan_unpacked
from pipelinerl.preprocess.samples import Sample
from pipelinerl.records import DataOrder, MicroBatch, TrainingSequence
from pipelinerl.records.batches import FROZEN, NOT_ROUTED
from pipelinerl.records.prefixes import sort_by_prefix

AggregationKind = Literal["sum_over_batch", "sum_over_texts", "token_mean", "sample_mean", "prompt_mean"]


@dataclass(frozen=True, kw_only=True)
class Members:
    """The properties of N rollouts that determine their weights."""

    counted_N: np.ndarray
    """int64: trained tokens of each rollout whose weight is not zero."""
    group_sizes_N: np.ndarray
    """int64: rollouts of the whole group that can be trained, in any optimizer step."""
    group_tokens_N: np.ndarray
    """int64: trained tokens of the group's rollouts whose weight is not zero."""
    texts_N: np.ndarray
    """int64: training sequences of each rollout."""


def rollout_weights(kind: AggregationKind, members: Members) -> np.ndarray:
    """float64 [N]: weight of each trained token of each rollout, for aggregation ``kind``.

    In `prompt_mean` the tokens of a group share a total weight of 1 / (groups in the batch). If the end of the batch
    cuts a group, each rollout keeps its share of its whole group's weight, and counts as 1 / size of a group.
    """
    counted_N = members.counted_N.astype(np.float64)
    n = len(counted_N)
    if kind == "sum_over_batch":
        denominators_N = np.full(n, float(n))
    elif kind == "sum_over_texts":
        denominators_N = np.full(n, float(members.texts_N.sum()))
    elif kind == "token_mean":
        denominators_N = np.full(n, counted_N.sum())
    elif kind == "sample_mean":
        denominators_N = n * counted_N
    else:
        denominators_N = (1.0 / members.group_sizes_N).sum() * members.group_tokens_N
    return np.divide(1.0, denominators_N, out=np.zeros(n), where=counted_N > 0)


EMPTY_TOKENS = 2
"""Length of the shortest sequence in which a language model predicts a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collation:
    """The part of the configuration that determines how an optimizer batch is collated."""

    data_parallel_size: int
    """Data-parallel ranks. Each gets micro-batches of its own; `finetune.seq_parallel` trainer ranks share them."""
    seq_length: int
    """Largest number of tokens of a packed micro-batch."""
    sequences_per_micro_batch: int | None = None
    """Sequences per micro-batch with `finetune.seq_packing=false`. None: pack up to ``seq_length`` tokens."""
    share_prefixes: bool = False
    """Whether ``seq_length`` bounds the tokens that are computed, where common prefixes are computed once."""
    advantage: str = "loo"
    aggregation: AggregationKind = "sum_over_batch"
    with_reference: bool = False
    with_teacher: bool = False
    with_average: bool = False
    """Whether a teacher is an average of the policy."""
    teacher_top_k: int = 0
    """Most likely tokens of the teacher in the place of each trained token."""
    sft_weight: float = 1.0
    """Weight of the mean loss of the batch's conversations to imitate, beside the loss of its rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    sequence: TrainingSequence
    sequence_id: str
    reward: float
    weight: float
    advantage: float
    ref_logprobs: np.ndarray | None
    teacher_logprobs: np.ndarray | None
    teacher_top: tuple[np.ndarray, np.ndarray] | None
    """int32 and float32 [K, J]: the teacher's most likely tokens and their log-probabilities."""
    teacher_versions: np.ndarray | None
    images: tuple[bytes, ...]
    token_weights: np.ndarray | None = None

    @property
    def ends_cut(self) -> bool:
        """The server cut its last completion for its length, so GAE bootstraps from the value of its end."""
        return self.sequence.finish_reason == "length"


def collate(batch: OptimizerBatch, collation: Collation) -> list[list[MicroBatch]]:
    """Make the micro-batches of every data-parallel rank, in the order of rounds. All ranks get the same number.

    A micro-batch is empty where a rank has no work in a round.
    """
    segments = _segments(batch.samples, collation)
    lengths = [len(segment.sequence.token_ids) for segment in segments]
    if collation.sequences_per_micro_batch is not None:
        plan = plan_unpacked(lengths, collation.data_parallel_size, collation.sequences_per_micro_batch)
    elif collation.share_prefixes:
        sequences = [segment.sequence for segment in segments]
        order, shared = sort_by_prefix(
            [sequence.token_ids for sequence in sequences],
            np.array([sequence.images is not None for sequence in sequences]),
        )
        untrained = [len(sequence.token_ids) - len(sequence.logprobs) for sequence in sequences]
        plan = plan_shared(lengths, untrained, order, shared, collation.data_parallel_size, collation.seq_length)
    else:
        plan = plan_packed(lengths, collation.data_parallel_size, collation.seq_length)
    num_tokens = sum(sample.num_trained for sample in batch.samples)
    return [
        [
            _micro_batch([segments[i] for i in slot], batch, index, len(slots), num_tokens, collation)
            for index, slot in enumerate(slots)
        ]
        for slots in plan
    ]


def with_order(batches: Sequence[Sequence[MicroBatch]], order: DataOrder) -> list[list[MicroBatch]]:
    """Return the same batches with ``order`` set in the first micro-batch of every rank."""
    return [[msgspec.structs.replace(first, order=order), *others] for first, *others in batches]


def with_held_out(
    batches: Sequence[Sequence[MicroBatch]], held_out: Sequence[Sequence[MicroBatch]]
) -> list[list[MicroBatch]]:
    """Return the micro-batches of every rank, and behind them those that are not trained, which weigh nothing."""
    count = len(batches[0]) + len(held_out[0])
    return [
        [
            *(msgspec.structs.replace(one, count=count) for one in trained),
            *(
                msgspec.structs.replace(
                    one,
                    index=len(trained) + one.index,
                    count=count,
                    segment_weights=np.zeros_like(one.segment_weights),
                    supervised=np.ones(len(one.segment_lengths), dtype=bool),
                )
                for one in tests
            ),
        ]
        for trained, tests in zip(batches, held_out, strict=True)
    ]


def _segments(samples: Sequence[Sample], collation: Collation) -> list[_Segment]:
    imitated = [sample for sample in samples if sample.token_weights is not None]
    return [
        *_rollout_segments([sample for sample in samples if sample.token_weights is None], collation),
        *_imitated_segments(imitated, collation),
    ]


def _imitated_segments(samples: Sequence[Sample], collation: Collation) -> list[_Segment]:
    """The segments of conversations. Their tokens share the weight ``sft_weight`` in proportion to their own."""
    total = sum(float(weights_K.sum()) for sample in samples for weights_K in sample.token_weights or ())
    return [
        _Segment(
            sequence=sequence,
            sequence_id=f"{sample.sample_id}/{index}",
            reward=sample.reward,
            weight=collation.sft_weight / total,
            advantage=0.0,
            ref_logprobs=np.zeros_like(weights_K),
            teacher_logprobs=np.zeros_like(weights_K),
            teacher_top=_no_top(len(weights_K), collation),
            teacher_versions=None,
            images=(),
            token_weights=weights_K,
        )
        for sample in samples
        for (index, sequence), weights_K in zip(sample.sequences, sample.token_weights or (), strict=True)
    ]


def _rollout_segments(samples: Sequence[Sample], collation: Collation) -> list[_Segment]:
    members = Members(
        counted_N=np.array([sample.num_counted for sample in samples], dtype=np.int64),
        texts_N=np.array([len(sample.sequences) for sample in samples], dtype=np.int64),
        group_sizes_N=np.array([sample.group_size for sample in samples], dtype=np.int64),
        group_tokens_N=np.array([sample.group_tokens for sample in samples], dtype=np.int64),
    )
    weights_N = rollout_weights(collation.aggregation, members)
    scale = 1.0
    if collation.advantage in SCALED_BY_BATCH:
        scale = batch_std_scale(np.array([advantage for sample in samples for advantage in sample.members]))
    return [
        _Segment(
            sequence=sequence,
            sequence_id=f"{sample.sample_id}/{index}",
            reward=sample.reward,
            weight=0.0 if index in sample.unweighted else weight,
            advantage=scale * advantage,
            ref_logprobs=sample.ref_logprobs[i] if sample.ref_logprobs is not None else None,
            teacher_logprobs=sample.teacher_logprobs[i] if sample.teacher_logprobs is not None else None,
            teacher_top=_top(sample, i),
            teacher_versions=sample.teacher_versions[i] if sample.teacher_versions is not None else None,
            images=sample.images,
        )
        for sample, weight in zip(samples, weights_N.tolist(), strict=True)
        for i, ((index, sequence), advantage) in enumerate(zip(sample.sequences, sample.advantages, strict=True))
    ]


def _top(sample: Sample, index: int) -> tuple[np.ndarray, np.ndarray] | None:
    ids, logprobs = sample.teacher_top_ids, sample.teacher_top_logprobs
    return None if ids is None or logprobs is None else (ids[index], logprobs[index])


def _no_top(num_trained: int, collation: Collation) -> tuple[np.ndarray, np.ndarray]:
    """Placeholders for a teacher's most likely tokens, where they are not used."""
    shape = (num_trained, collation.teacher_top_k)
    return np.zeros(shape, np.int32), np.zeros(shape, np.float32)


def _top_columns(segments: Sequence[_Segment], collation: Collation) -> dict[str, Any]:
    """The teacher's most likely tokens as fields of a micro-batch. Empty without any."""
    if not collation.teacher_top_k:
        return {}
    found = [_no_top(0, collation), *(segment.teacher_top for segment in segments)]
    assert all(top is not None for top in found), "a sample without its teacher's most likely tokens"
    ids, logprobs = zip(*(top for top in found if top is not None), strict=True)
    return {"teacher_top_ids": np.concatenate(ids), "teacher_top_logprobs": np.concatenate(logprobs)}


def _teacher_versions(segments: Sequence[_Segment], starts_S: Sequence[int], total: int) -> np.ndarray:
    """int32 [T]: `MicroBatch.teacher_versions`."""
    versions_T = np.full(total, FROZEN, dtype=np.int32)
    for segment, start in zip(segments, starts_S, strict=True):
        if segment.teacher_versions is not None:
            _scatter(segment, "teacher_versions", start, versions_T)
    return versions_T


def _micro_batch(
    segments: Sequence[_Segment],
    batch: OptimizerBatch,
    index: int,
    count: int,
    num_tokens: int,
    collation: Collation,
) -> MicroBatch:
    if not segments:
        return _empty_micro_batch(batch, index, count, num_tokens, collation)
    lengths_S = np.array([len(segment.sequence.token_ids) for segment in segments], dtype=np.int32)
    starts_S = (np.cumsum(lengths_S) - lengths_S).tolist()
    total = int(lengths_S.sum())
    columns = {name: np.zeros(total, dtype=np.float32) for name in _columns(collation)}
    for segment, start in zip(segments, starts_S, strict=True):
        for name, column_T in columns.items():
            _scatter(segment, name, start, column_T)
    num_spans_S = [len(segment.sequence.spans) for segment in segments]
    spans_R3 = np.concatenate([segment.sequence.spans for segment in segments]).astype(np.int32)
    spans_R3[:, :2] += np.repeat(np.array(starts_S, dtype=np.int32), num_spans_S)[:, None]
    images, image_spans = _images(segments, starts_S)
    return MicroBatch(
        step=batch.step,
        index=index,
        count=count,
        token_ids=np.concatenate([segment.sequence.token_ids for segment in segments]).astype(np.int32, copy=False),
        segment_lengths=lengths_S,
        segment_weights=np.array([segment.weight for segment in segments], dtype=np.float32),
        spans=spans_R3,
        **_record_columns(columns),
        **_top_columns(segments, collation),
        teacher_versions=_teacher_versions(segments, starts_S, total) if collation.with_average else None,
        num_samples=batch.size,
        num_tokens=num_tokens,
        sequence_ids=tuple(segment.sequence_id for segment in segments),
        rewards=np.array([segment.reward for segment in segments], dtype=np.float32),
        cut=np.array([segment.ends_cut for segment in segments]) if collation.advantage == "value" else None,
        next_source=batch.next_source,
        routed_experts=_routed_experts([segment.sequence for segment in segments], starts_S, total),
        images=images,
        image_spans=image_spans,
        supervised=_supervised(segments),
    )


def _supervised(segments: Sequence[_Segment]) -> np.ndarray | None:
    """bool [S]: which segments are imitated. None: none of them."""
    imitated_S = np.array([segment.token_weights is not None for segment in segments])
    return imitated_S if imitated_S.any() else None


def _images(segments: Sequence[_Segment], starts_S: Sequence[int]) -> tuple[tuple[bytes, ...], np.ndarray | None]:
    """Return the images of all segments, each once, and int32 [I, 3]: (index, start, end exclusive) of their tokens.

    The attempts at a problem show the same images, so most are in several segments.
    """
    places: dict[bytes, int] = {}
    rows = [
        (places.setdefault(segment.images[index], len(places)), start + first, start + end)
        for segment, start in zip(segments, starts_S, strict=True)
        if segment.sequence.images is not None
        for index, first, end in segment.sequence.images.tolist()
    ]
    return tuple(places), np.array(rows, dtype=np.int32) if rows else None


def _routed_experts(sequences: Sequence[TrainingSequence], starts_S: Sequence[int], total: int) -> np.ndarray | None:
    """Return the routing of all tokens, int16 [T, layers × experts per token], or None if no sequence has any.

    Tokens of a sequence without routing get `NOT_ROUTED`.
    """
    width = next((s.routed_experts.shape[1] for s in sequences if s.routed_experts is not None), None)
    if width is None:
        return None
    routed_TR = np.full((total, width), NOT_ROUTED, dtype=np.int16)
    for sequence, start in zip(sequences, starts_S, strict=True):
        if sequence.routed_experts is not None:
            routed_TR[start : start + len(sequence.routed_experts)] = sequence.routed_experts
    return routed_TR


def _columns(collation: Collation) -> tuple[str, ...]:
    """Names of the float columns of a micro-batch, one value per token."""
    scored = ("ref_logprobs",) * collation.with_reference + ("teacher_logprobs",) * collation.with_teacher
    return ("logprobs", "advantages", *scored)


def _record_columns(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """The columns as fields of a record. ``ref_logprobs`` is always there."""
    return {"ref_logprobs": None, **columns}


def _scatter(segment: _Segment, name: str, start: int, column_T: np.ndarray) -> None:
    """Write a figure of the segment's trained tokens to the positions of its spans, shifted by ``start``."""
    sequence = segment.sequence
    values_K: np.ndarray | None
    if name == "logprobs":
        values_K = sequence.logprobs
    elif name != "advantages":
        values_K = getattr(segment, name)
    elif segment.token_weights is not None:
        values_K = segment.token_weights
    else:
        values_K = np.full(len(sequence.logprobs), segment.advantage)
    assert values_K is not None, f"{segment.sequence_id} has no {name}"
    offset = 0
    for first, end, _ in sequence.spans.tolist():
        column_T[start + first : start + end] = values_K[offset : offset + end - first]
        offset += end - first
    assert offset == len(values_K), f"{segment.sequence_id}: its spans do not cover its {name}"


def _empty_micro_batch(
    batch: OptimizerBatch, index: int, count: int, num_tokens: int, collation: Collation
) -> MicroBatch:
    """Make a micro-batch that fills an empty slot: one short segment of token 0, weight 0, without trained tokens."""
    return MicroBatch(
        step=batch.step,
        index=index,
        count=count,
        token_ids=np.zeros(EMPTY_TOKENS, dtype=np.int32),
        segment_lengths=np.array([EMPTY_TOKENS], dtype=np.int32),
        segment_weights=np.zeros(1, dtype=np.float32),
        spans=np.zeros((0, 3), dtype=np.int32),
        **_record_columns({name: np.zeros(EMPTY_TOKENS, dtype=np.float32) for name in _columns(collation)}),
        **_top_columns((), collation),
        teacher_versions=np.full(EMPTY_TOKENS, FROZEN, dtype=np.int32) if collation.with_average else None,
        num_samples=batch.size,
        num_tokens=num_tokens,
        sequence_ids=("sentinel",),
        rewards=np.zeros(1, dtype=np.float32),
        cut=np.zeros(1, dtype=bool) if collation.advantage == "value" else None,
        next_source=batch.next_source,
        sentinel=True,
    )
