"""The tokens of a rank of sequence parallelism: every constant of a token goes where the token's predictor goes."""

from dataclasses import replace

import pytest
import torch

from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.rl.tokens import LagInputs, SequenceGroup, TokenInputs
from pipelinerl.finetune.sequence import slice_batch

PREDICTORS = [0, 1, 2, 4, 5, 6]
"""Row t predicts token t + 1 of a document of 7 tokens. Token 4, which row 3 predicts, is not trained."""


def whole(*, ref: bool = True, routed: bool = True) -> Batch:
    order = torch.arange(1.0, 7.0)
    inputs = TokenInputs(
        sampler_logprobs_K=-order,
        advantages_K=10 * order,
        weights_K=order / 8,
        segments_K=torch.zeros(6, dtype=torch.int64),
        num_segments=1,
        ref_logprobs_K=-100 * order if ref else None,
    )
    return Batch(
        input_ids=torch.arange(20, 27)[None],
        position_ids=torch.arange(7)[None],
        predictors_K=torch.tensor(PREDICTORS),
        targets_K=torch.tensor([21, 22, 23, 25, 26, 27]),
        inputs=inputs,
        lags=LagInputs(lag_K=torch.arange(1, 7), in_flight_K=torch.arange(11, 17)),
        segment_rewards_S=torch.tensor([1.0]),
        num_tokens=7,
        documents=(7,),
        routed_experts_NR=torch.arange(7, dtype=torch.int16)[:, None] if routed else None,
    )


@pytest.mark.parametrize(
    ("index", "rows", "predictors", "trained"),
    [(0, [0, 1, 6, 7], [0, 1, 2], [1, 2, 6]), (1, [2, 3, 4, 5], [0, 2, 3], [3, 4, 5])],
)
def test_rank_has_every_constant_of_the_tokens_that_its_rows_predict(
    index: int, rows: list[int], predictors: list[int], trained: list[int]
) -> None:
    """7 tokens and one of padding in blocks of two: rank 0 of 2 holds the first and the last one. ``trained``: which of
    the trained tokens, from 1, are its own. Padding has id 0, position 0 and no known experts."""
    group = SequenceGroup(None, index, 2)
    own = slice_batch(whole(), group)
    assert own.input_ids.tolist() == [[20 + row if row < 7 else 0 for row in rows]]
    assert own.position_ids.tolist() == [[row if row < 7 else 0 for row in rows]]
    assert own.routed_experts_NR is not None
    assert own.routed_experts_NR.tolist() == [[row if row < 7 else -1] for row in rows]
    assert own.predictors_K.tolist() == predictors
    assert own.targets_K.tolist() == [whole().targets_K[k - 1] for k in trained]
    inputs = own.inputs
    assert inputs.ref_logprobs_K is not None
    assert inputs.ref_logprobs_K.tolist() == [-100.0 * k for k in trained]
    assert inputs.sampler_logprobs_K.tolist() == [-1.0 * k for k in trained]
    assert inputs.advantages_K.tolist() == [10.0 * k for k in trained]
    assert inputs.weights_K.tolist() == [k / 8 for k in trained]
    assert (inputs.segments_K.tolist(), inputs.num_segments, inputs.group) == ([0] * 3, 1, group)
    assert own.lags.lag_K.tolist() == trained
    assert own.lags.in_flight_K.tolist() == [10 + k for k in trained]
    assert own.documents == (7, 1)
    assert (own.num_tokens, own.segment_rewards_S.tolist()) == (7, [1.0])


def test_batch_without_reference_and_experts_has_none_on_any_rank() -> None:
    own = slice_batch(whole(ref=False, routed=False), SequenceGroup(None, 1, 2))
    assert (own.inputs.ref_logprobs_K, own.routed_experts_NR) == (None, None)


def test_batch_that_the_ranks_divide_is_not_padded() -> None:
    batch = replace(whole(), input_ids=torch.arange(20, 28)[None], position_ids=torch.arange(8)[None], documents=(8,))
    own = slice_batch(replace(batch, routed_experts_NR=None), SequenceGroup(None, 0, 2))
    assert (own.input_ids.tolist(), own.documents) == ([[20, 21, 26, 27]], (8,))
