"""Micro-batches to tensors: what is trained, in which layout, and what is refused."""

from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import RecordError
from pipelinerl.finetune.data import check_record, in_rows, index_tokens, packed, to_batch, with_shared_prefixes
from pipelinerl.records import MicroBatch


def make_record(**changes: Any) -> MicroBatch:
    """Two segments of 4 and 3 tokens; trained: 2, 3 by version 5 and 5 by version 4 and 6 by version 6."""
    record = MicroBatch(
        step=7,
        index=0,
        count=1,
        token_ids=np.array([10, 11, 12, 13, 20, 21, 22], np.int32),
        segment_lengths=np.array([4, 3], np.int32),
        segment_weights=np.array([0.5, 0.25], np.float32),
        spans=np.array([[2, 4, 5], [5, 6, 4], [6, 7, 6]], np.int32),
        logprobs=np.array([0, 0, -1, -2, 0, -3, -4], np.float32),
        advantages=np.array([0, 0, 1, 1, 0, -1, -1], np.float32),
        ref_logprobs=None,
        num_samples=2,
        num_tokens=4,
        sequence_ids=("a/0/0", "a/1/0"),
        rewards=np.array([1, 0], np.float32),
        next_source=(0, 0),
    )
    return msgspec.structs.replace(record, **changes)


def test_index_names_positions_segments_and_versions() -> None:
    index = index_tokens(make_record())
    assert index.positions_K.tolist() == [2, 3, 5, 6]
    assert index.segments_K.tolist() == [0, 0, 1, 1]
    assert index.versions_K.tolist() == [5, 5, 4, 6]


@pytest.mark.parametrize("rows", [False, True])
def test_batch_predicts_each_trained_token_from_the_one_before(rows: bool) -> None:
    record = make_record()
    batch = to_batch(record, index_tokens(record), layout=(in_rows if rows else packed)(record.segment_lengths))
    assert batch.targets_K.tolist() == [12, 13, 21, 22]
    assert batch.input_ids.flatten()[batch.predictors_K].tolist() == [11, 12, 20, 21]
    assert batch.position_ids.expand_as(batch.input_ids).flatten()[batch.predictors_K].tolist() == [1, 2, 0, 1]
    assert batch.inputs.sampler_logprobs_K.tolist() == [-1, -2, -3, -4]
    assert batch.inputs.weights_K.tolist() == [0.5, 0.5, 0.25, 0.25]
    assert batch.lags.lag_K.tolist() == [2, 2, 3, 1]
    assert batch.lags.in_flight_K.tolist() == [0, 0, 2, 0]
    assert batch.input_ids.shape == ((2, 4) if rows else (1, 7))


def prefers_rows(segment_lengths: np.ndarray, dense_mask: bool = True) -> bool:
    """With 384 units per token."""
    return in_rows(segment_lengths).cost(384, dense_mask) < packed(segment_lengths).cost(384, dense_mask)


def test_rows_are_preferred_for_equal_lengths_and_packing_for_unequal_ones() -> None:
    assert prefers_rows(np.full(64, 40))
    assert not prefers_rows(np.array([400, 10, 10, 10, 10, 10]))
    assert not prefers_rows(np.array([100]))


def test_without_a_dense_mask_rows_are_for_many_short_segments_only() -> None:
    """By hand, 384 units per token: 64 × 40 in rows 2,560·424 = 1,085,440; packed 983,040 + 64·(1,600 + 2,604) =
    1,252,096. 8 × 4,000 with one of 3,000: rows 32,000·4,384 = 140,288,000; packed 31,000·384 + 121,000,000 + 20,832.
    """
    short, long = np.full(64, 40), np.array([4000] * 7 + [3000])
    assert prefers_rows(short, dense_mask=False)
    assert not prefers_rows(long, dense_mask=False)
    assert prefers_rows(long, dense_mask=True)


def test_even_a_short_prefix_costs_less_shared_than_in_whole_documents() -> None:
    """By hand, 384 units per token: two of 1,088 packed cost 2,176·384 + 2·1,088² + 5,208 = 3,208,280, and with 64
    tokens shared 2,112·384 + 1,088² + 1,024·1,152 + 5,208 = 3,179,608.
    """
    long, shared = np.full(2, 1088), np.array([0, 64])
    assert packed(long).cost(384, dense_mask=False) == 3_208_280
    assert with_shared_prefixes(long, np.arange(2), shared).cost(384, dense_mask=False) == 3_179_608


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spans": np.array([[4, 6, 5]], np.int32)}, "a/1/0.*first token"),
        ({"step": 9}, r"a/1/0: lag 5 exceeds max_lag_steps=4"),
        ({"logprobs": np.array([0, 0, -1, np.nan, 0, -3, -4], np.float32)}, "a/0/0"),
        ({"advantages": np.array([0, 0, 1, 1, 0, np.inf, -1], np.float32)}, "a/1/0"),
        ({"token_ids": np.array([10, 11, 12, 13, 20, 21, 99], np.int32)}, "a/1/0"),
    ],
)
def test_what_may_not_reach_a_gradient_is_refused_with_its_sample(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        check_record(make_record(**changes), vocab_size=50, max_lag_steps=4)


def test_losses_get_returns_with_a_value_head_and_else_the_rollouts_reward() -> None:
    """With a value head `advantages` holds what each token earns from there on, which is not the rollout's reward."""
    record = make_record()
    assert to_batch(record, index_tokens(record), layout=packed(record.segment_lengths)).inputs.rewards_K.tolist() == [
        1,
        1,
        0,
        0,
    ]
    returns = np.array([0, 0, 0.5, 0.25, 0, -2, -3], np.float32)
    record = make_record(advantages=returns, cut=np.array([False, True]))
    batch = to_batch(record, index_tokens(record), layout=packed(record.segment_lengths))
    assert batch.inputs.rewards_K.tolist() == [0.5, 0.25, -2, -3]
    assert batch.segment_rewards_S.tolist() == [1, 0]


@pytest.mark.parametrize(("rows", "expected"), [(False, [0, 1, 2, 3, 4, 5, 6]), (True, [0, 1, 2, 3, 4, 5, 6, -1])])
def test_experts_lie_on_the_grid_and_padding_has_none(rows: bool, expected: list[int]) -> None:
    record = make_record(routed_experts=np.arange(7, dtype=np.int16)[:, None])
    batch = to_batch(record, index_tokens(record), layout=(in_rows if rows else packed)(record.segment_lengths))
    assert batch.routed_experts_NR is not None
    assert batch.routed_experts_NR[:, 0].tolist() == expected
