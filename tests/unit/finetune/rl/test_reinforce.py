"""REINFORCE's bounded weight by hand: the clamp clips, a mask that bounds the weight itself leaves nothing to clip."""

import math
from typing import Any

import pytest
import torch

from pipelinerl.finetune.rl.corrections import Corrections
from pipelinerl.finetune.rl.interface import PolicyTokens
from pipelinerl.finetune.rl.losses import reinforce
from pipelinerl.finetune.rl.tokens import TokenInputs

RATIOS = [0.5, 2.0, 3.0, 8.0]


@pytest.mark.parametrize(
    ("bounds", "weights", "clipped"),
    [
        ({}, [0.5, 2.0, 2.0, 2.0], [False, False, True, True]),
        ({"token_mis": 4.0}, [0.5, 2.0, 3.0, 0.0], [False] * 4),
    ],
)
def test_clamp_at_two_clips_larger_weights_unless_a_mask_bounds_them(
    bounds: dict[str, Any], weights: list[float], clipped: list[bool]
) -> None:
    """At log π = −1 and an advantage of 1, a token's loss is its weight."""
    logprobs_K = torch.full((4,), -1.0, dtype=torch.float64)
    inputs = TokenInputs(
        sampler_logprobs_K=logprobs_K - torch.tensor([math.log(ratio) for ratio in RATIOS], dtype=torch.float64),
        advantages_K=torch.ones(4, dtype=torch.float64),
        weights_K=torch.ones(4, dtype=torch.float64),
        segments_K=torch.zeros(4, dtype=torch.int64),
        num_segments=1,
    )
    found = reinforce(logprobs_K, PolicyTokens(logprobs_K, inputs, Corrections(**bounds), False), ratio_clamp=2.0)
    torch.testing.assert_close(found.losses_K, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert found.clipped_K is not None
    assert found.clipped_K.tolist() == clipped
