"""Micro-batches by hand, and the invariant that packing changes neither tokens nor loss weights."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from benchmarks.synthetic_groups import make_groups
from pipelinerl.errors import RecordError
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.samples import Sample, Shaping, prepare_group
from pipelinerl.records import TrainingSequence
from pipelinerl.records.check import check_micro_batch
from tests.says import says


def sequence(first: int, spans, total: int) -> TrainingSequence:
    spans_R3 = np.array(spans, np.int32)
    count = int((spans_R3[:, 1] - spans_R3[:, 0]).sum())
    return TrainingSequence(
        token_ids=np.arange(first, first + total, dtype=np.int32),
        logprobs=-np.arange(1, count + 1, dtype=np.float32),
        spans=spans_R3,
        finish_reason="stop",
    )


def by_hand(**fields) -> Sample:
    defaults = {"domain": "d", "reward": 1.0, "num_tokens": 0}
    return Sample(**(defaults | fields))


A = by_hand(
    sample_id="0-0/0",
    group_id="0-0",
    source=(0, 0),
    reward=2.0,
    sequences=((0, sequence(10, [[1, 3, 5], [4, 5, 6]], 5)), (1, sequence(20, [[2, 3, 6]], 3))),
    advantages=(0.5, -0.5),
    members=(0.5, -0.5),
    ref_logprobs=(np.array([-7.0, -8.0, -9.0], np.float32), np.array([-3.0], np.float32)),
    num_trained=4,
    group_size=2,
    group_tokens=5,
)
B = by_hand(
    sample_id="0-0/1",
    group_id="0-0",
    source=(0, 1),
    sequences=((0, sequence(30, [[1, 2, 4]], 2)),),
    advantages=(3.0,),
    members=(3.0,),
    ref_logprobs=(np.array([-5.0], np.float32),),
    num_trained=1,
    group_size=2,
    group_tokens=5,
)
BATCH = OptimizerBatch(step=6, samples=(A, B), next_source=(0, 2))


def test_collate_sample_that_the_reference_never_scored_is_not_given_zeros():
    unscored = OptimizerBatch(step=6, samples=(A, replace(B, ref_logprobs=None)), next_source=(0, 2))
    with pytest.raises(AssertionError, match=says("0-0/1/0", "ref_logprobs")):
        collate(unscored, Collation(data_parallel_size=1, seq_length=10, with_reference=True))


def test_collate_segment_is_cut_only_where_its_last_answer_was():
    """An answer after one that was cut may end by itself: then no value stands for what would have come."""
    earlier, last = ({"earlier_cut": True}, {"finish_reason": "length"})
    (_, plain), (_, cut) = A.sequences
    sequences = ((0, msgspec.structs.replace(plain, **earlier)), (1, msgspec.structs.replace(cut, **last)))
    batch = replace(BATCH, samples=(replace(A, sequences=sequences), B))
    ((mb,),) = collate(batch, Collation(data_parallel_size=1, seq_length=10, advantage="value"))
    assert mb.cut is not None
    assert dict(zip(mb.sequence_ids, mb.cut.tolist(), strict=True)) == {
        "0-0/0/0": False,
        "0-0/0/1": True,
        "0-0/1/0": False,
    }


def test_collate_one_micro_batch_by_hand():
    ((mb,),) = collate(
        BATCH, Collation(data_parallel_size=1, seq_length=10, with_reference=True, aggregation="sample_mean")
    )
    assert mb.sequence_ids == ("0-0/0/0", "0-0/0/1", "0-0/1/0")
    assert (mb.step, mb.index, mb.count, mb.num_samples, mb.num_tokens) == (6, 0, 1, 2, 5)
    assert mb.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 30, 31]
    assert mb.segment_lengths.tolist() == [5, 3, 2]
    assert mb.spans.tolist() == [[1, 3, 5], [4, 5, 6], [7, 8, 6], [9, 10, 4]]
    assert mb.logprobs.tolist() == [0, -1, -2, 0, -3, 0, 0, -1, 0, -1]
    assert mb.advantages.tolist() == [0, 0.5, 0.5, 0, 0.5, 0, 0, -0.5, 0, 3]
    assert mb.ref_logprobs.tolist() == [0, -7, -8, 0, -9, 0, 0, -3, 0, -5]
    assert mb.rewards.tolist() == [2, 2, 1]
    np.testing.assert_allclose(mb.segment_weights, [1 / 8, 1 / 8, 1 / 2], rtol=1e-7)
    assert mb.next_source == (0, 2)
    assert not mb.sentinel
    check_micro_batch(mb, vocab_size=40)
    assert {a.dtype.name for a in (mb.token_ids, mb.spans, mb.segment_lengths)} == {"int32"}
    assert {a.dtype.name for a in (mb.logprobs, mb.advantages, mb.ref_logprobs, mb.rewards)} == {"float32"}


def test_collate_batch_std_divides_by_the_deviation_over_rollouts():
    """A's steps differ and count singly: std of (0.5, −0.5, 3) with ddof 1."""
    ((mb,),) = collate(BATCH, Collation(data_parallel_size=1, seq_length=10, advantage="batch_std"))
    std = np.std([0.5, -0.5, 3.0], ddof=1)
    np.testing.assert_allclose(mb.advantages[[1, 7, 9]], np.array([0.5, -0.5, 3.0]) / std, rtol=1e-6)
    assert mb.ref_logprobs is None


def test_collate_batch_std_counts_a_rollout_of_several_sequences_once():
    """Rollout A has the advantage 1 on both of its sequences, B has −2: the mean of (1, −2) is −1/2, its deviation with
    ddof 1 is √(2 · 1.5²) = 3/√2. Over the sequences (1, 1, −2) it would be √3."""
    several, single = replace(A, advantages=(1.0, 1.0), members=(1.0,)), replace(B, advantages=(-2.0,), members=(-2.0,))
    batch = OptimizerBatch(step=6, samples=(several, single), next_source=(0, 2))
    ((mb,),) = collate(batch, Collation(data_parallel_size=1, seq_length=10, advantage="batch_std"))
    np.testing.assert_allclose(mb.advantages[[1, 7, 9]], [2**0.5 / 3, 2**0.5 / 3, -2 * 2**0.5 / 3], rtol=1e-6)


def test_collate_fewer_sequences_than_ranks_sends_valid_empty_micro_batches():
    ranks = collate(BATCH, Collation(data_parallel_size=4, seq_length=10, with_reference=True))
    assert [len(rank) for rank in ranks] == [1, 1, 1, 1]
    empty = [mb for rank in ranks for mb in rank if mb.sentinel]
    assert len(empty) == 1
    assert empty[0].spans.shape == (0, 3)
    assert empty[0].segment_weights.tolist() == [0]
    assert empty[0].token_ids.tolist() == [0, 0]
    assert empty[0].ref_logprobs is not None
    assert empty[0].ref_logprobs.tolist() == [0, 0]
    for rank in ranks:
        check_micro_batch(rank[0], vocab_size=40)


def test_collate_empty_micro_batches_without_a_reference_have_none():
    ranks = collate(BATCH, Collation(data_parallel_size=4, seq_length=10))
    assert [mb.ref_logprobs for rank in ranks for mb in rank] == [None] * 4


def test_collate_zero_weight_rollout_is_packed_with_weight_zero():
    zero = by_hand(
        sample_id="0-0/1",
        group_id="0-0",
        source=(0, 1),
        sequences=B.sequences,
        advantages=B.advantages,
        num_trained=1,
        unweighted=frozenset({0}),
    )
    batch = OptimizerBatch(step=6, samples=(A, zero), next_source=(0, 2))
    ((mb,),) = collate(batch, Collation(data_parallel_size=1, seq_length=10, aggregation="token_mean"))
    np.testing.assert_allclose(mb.segment_weights, [0.25, 0.25, 0.0], rtol=1e-7)
    assert mb.num_samples == 2


def token_contributions(ranks) -> dict[tuple[str, int], tuple]:
    """For every trained token: id, log-prob, advantage, version and weight, by (segment, position in it)."""
    found = {}
    for mb in (mb for rank in ranks for mb in rank):
        ends = np.cumsum(mb.segment_lengths)
        for start, end, version in mb.spans.tolist():
            for t in range(start, end):
                s = int(np.searchsorted(ends, t, side="right"))
                place = (mb.sequence_ids[s], t - int(ends[s] - mb.segment_lengths[s]))
                assert place not in found
                found[place] = (
                    int(mb.token_ids[t]),
                    float(mb.logprobs[t]),
                    float(mb.advantages[t]),
                    version,
                    float(mb.segment_weights[s]),
                )
    return found


@pytest.mark.parametrize(
    "aggregation", ["sum_over_batch", "sum_over_texts", "token_mean", "sample_mean", "prompt_mean"]
)
@pytest.mark.parametrize("turns", [1, 3])
def test_collate_any_packing_yields_the_same_trained_tokens_and_weights(aggregation, turns):
    shaping = Shaping(seq_length=9000)
    samples = [
        s for i, g in enumerate(make_groups(1, 2, attempts=4, turns=turns)) for s in prepare_group(i, g, shaping)
    ]
    batch = OptimizerBatch(step=1, samples=tuple(samples), next_source=(2, 0))
    common = {"aggregation": aggregation}
    reference = token_contributions(collate(batch, Collation(data_parallel_size=1, seq_length=10**6, **common)))
    assert len(reference) == sum(s.num_trained for s in samples)
    for collation in (
        Collation(data_parallel_size=1, seq_length=9000, **common),
        Collation(data_parallel_size=3, seq_length=9000, **common),
        Collation(data_parallel_size=2, seq_length=9000, sequences_per_micro_batch=2, **common),
    ):
        assert token_contributions(collate(batch, collation)) == reference


def test_experts_lie_at_their_tokens_and_are_unknown_elsewhere() -> None:
    """Sequence A of 5 tokens has them for its first 4; the other sequence of 3 tokens has none."""
    (index, first), other = A.sequences
    rows = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.uint8)
    known = replace(A, sequences=((index, msgspec.structs.replace(first, routed_experts=rows)), other))
    batch = OptimizerBatch(step=6, samples=(known,), next_source=(0, 1))
    ((record,),) = collate(batch, Collation(data_parallel_size=1, seq_length=8))
    assert record.routed_experts is not None
    starts = dict(zip(record.sequence_ids, np.cumsum(record.segment_lengths) - record.segment_lengths, strict=True))
    place = starts["0-0/0/0"]
    assert record.routed_experts[place : place + 4].tolist() == rows.tolist()
    assert (np.delete(record.routed_experts, np.s_[place : place + 4], 0) == -1).all()
    check_micro_batch(record, vocab_size=100)
    with pytest.raises(RecordError, match=says("routed_experts", "int16", "(7, 2)", "integer", "8 rows")):
        check_micro_batch(msgspec.structs.replace(record, routed_experts=record.routed_experts[1:]), vocab_size=100)
    second = msgspec.structs.replace(other[1], routed_experts=rows[:2])
    batch_of_second = replace(batch, samples=(replace(A, sequences=((index, first), (other[0], second))),))
    ((record,),) = collate(batch_of_second, Collation(data_parallel_size=1, seq_length=8))
    assert record.routed_experts is not None
    assert record.routed_experts.tolist() == [[-1, -1]] * 5 + [[1, 2], [3, 4], [-1, -1]]
    ((plain,),) = collate(replace(batch, samples=(A,)), Collation(data_parallel_size=1, seq_length=8))
    assert plain.routed_experts is None


def test_collate_puts_each_image_once_and_shifts_the_places_of_its_tokens():
    """Two attempts at one problem show the same image, the second another one too."""

    def showing(sample: Sample, files: tuple[bytes, ...], rows: list[list[int]]) -> Sample:
        index, first = sample.sequences[0]
        shown = msgspec.structs.replace(first, images=np.array(rows, np.int32))
        return replace(sample, images=files, sequences=((index, shown), *sample.sequences[1:]))

    samples = (showing(A, (b"x",), [[0, 0, 1]]), showing(B, (b"y", b"x"), [[1, 0, 1], [0, 1, 2]]))
    batch = OptimizerBatch(step=6, samples=samples, next_source=(0, 2))
    ((mb,),) = collate(batch, Collation(data_parallel_size=1, seq_length=10))
    assert mb.segment_lengths.tolist() == [5, 3, 2]
    assert mb.images == (b"x", b"y")
    assert mb.image_spans is not None
    assert mb.image_spans.tolist() == [[0, 0, 1], [0, 8, 9], [1, 9, 10]]
    check_micro_batch(mb, vocab_size=100)
    ((without,),) = collate(BATCH, Collation(data_parallel_size=1, seq_length=10))
    assert (without.images, without.image_spans) == ((), None)
