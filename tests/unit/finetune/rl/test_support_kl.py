"""The divergence over a teacher's most likely tokens by hand, where little or nothing is left for the other tokens."""

import math

import pytest
import torch

from pipelinerl.finetune.rl.objective import support_kl


@pytest.mark.parametrize(
    ("policy", "teacher", "expected"),
    [
        ([0.5, 0.25], [0.25, 0.25], 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)),
        ([0.5, 0.499], [0.5, 0.496], 0.499 * math.log(499 / 496) + 0.001 * math.log(1 / 4)),
        ([0.5, 0.4], [0.5, 0.5], 0.4 * math.log(4 / 5) + 0.1 * math.log(0.1 / 1e-6)),  # the teacher's rest is bounded
    ],
)
def test_support_kl_counts_the_rest_down_to_a_millionth(
    policy: list[float], teacher: list[float], expected: float
) -> None:
    given = (torch.tensor([values], dtype=torch.float64).log() for values in (policy, teacher))
    torch.testing.assert_close(support_kl(*given), torch.tensor([expected], dtype=torch.float64), rtol=1e-9, atol=0.0)
