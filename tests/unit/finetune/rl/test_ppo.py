"""PPO's clip by hand, at and on both sides of its bounds."""

import pytest
import torch

from pipelinerl.finetune.rl.losses import clipped_surrogate

LOW, HIGH, DUAL = 0.25, 0.5, 3.0
"""The clip keeps ratios from 3/4 to 3/2, and those of a negative advantage below 3."""


@pytest.mark.parametrize(
    ("advantage", "losses", "clipped"),
    [
        (2.0, [-1.0, -1.5, -2.0, -3.0, -3.0, -3.0], [0, 0, 0, 0, 1, 1]),
        (-2.0, [1.5, 1.5, 2.0, 3.0, 4.0, 6.0], [1, 0, 0, 0, 0, 1]),
        (0.0, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0, 0, 0]),
    ],
)
def test_clip_acts_where_the_policy_has_moved_the_way_of_the_advantage_beyond_the_bound(
    advantage: float, losses: list[float], clipped: list[int]
) -> None:
    ratios = torch.tensor([0.5, 0.75, 1.0, 1.5, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    found = clipped_surrogate(ratios, torch.full((6,), advantage, dtype=torch.float64), LOW, HIGH, DUAL)
    torch.testing.assert_close(found.losses_K, torch.tensor(losses, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert found.clipped_K is not None
    assert found.clipped_K.tolist() == [bool(flag) for flag in clipped]
    (gradient,) = torch.autograd.grad(found.losses_K.sum(), ratios)
    assert [value == 0.0 for value in gradient.tolist()] == [bool(flag) or not advantage for flag in clipped]
