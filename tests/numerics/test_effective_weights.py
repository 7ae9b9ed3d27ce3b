"""A ratio is counted once: what multiplies −A·∇log π for every loss × correction (docs/algorithms.md §2).

The oracle is written from the definitions: REINFORCE weighs by min(ρ, c, C) or ρ·1[ρ ≤ C]; a clipped loss against μ
holds ρ itself, so that masks multiply it by 0 or 1 and truncation is refused; with a proximal policy w = π_prox/μ,
truncated or masked, multiplies the clipped term once. `python tests/numerics/test_effective_weights.py` writes the
table of docs/algorithms.md from the code.
"""

import math
import re
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.objective import LossSettings, token_losses
from pipelinerl.finetune.rl.tokens import TokenInputs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- begin: written by tests/numerics/test_effective_weights.py -->", "<!-- end -->"
RATIOS = (0.5, 1.0, 1.5, 4.0, 10.0, 100.0)
C, CLAMP, EPSILON = 2.0, 5.0, 0.2
CORRECTIONS = ("none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "veto")
LIMITS = {"none": {}, "veto": {"veto": 0.6}} | {name: {name: C} for name in CORRECTIONS[1:5]}
LOSSES = {
    "reinforce": {"policy_loss": "reinforce"},
    "ppo": {"policy_loss": "ppo"},
    "gspo": {"policy_loss": "gspo"},
    "ppo, proximal_every": {"policy_loss": "ppo", "proximal": True},
    "gspo, proximal_every": {"policy_loss": "gspo", "proximal": True},
    "decoupled_ppo": {"policy_loss": "decoupled_ppo", "proximal": True},
}
REFUSED = "refused"


def oracle(loss: str, correction: str, ratio: float) -> float | str:
    """Effective weight of a sequence of one token with advantage 1, before the first step on its batch."""
    masked = {"token_mis": ratio > C, "sequence_mis": ratio > C, "veto": ratio < 0.6}.get(correction, False)
    truncated = correction.endswith("tis")
    if loss == "reinforce":
        if correction.endswith("mis"):
            return 0.0 if masked else ratio
        return 0.0 if masked else min(ratio, CLAMP, C if truncated else math.inf)
    if loss in ("ppo", "gspo"):
        if truncated:
            return REFUSED
        return 0.0 if masked or ratio > 1 + EPSILON else ratio
    return 0.0 if masked else min(ratio, C) if truncated else ratio


def effective_weight(loss: str, correction: str, ratio: float) -> float | str:
    """The gradient of the code's loss with respect to −log π of a token with advantage 1."""
    logprobs = torch.tensor([-1.3], dtype=torch.float64, requires_grad=True)
    inputs = TokenInputs(
        sampler_logprobs_K=logprobs.detach() - math.log(ratio),
        advantages_K=torch.ones(1, dtype=torch.float64),
        weights_K=torch.ones(1, dtype=torch.float64),
        segments_K=torch.zeros(1, dtype=torch.int64),
        num_segments=1,
    )
    options = {"ratio_clamp": CLAMP, "epsilon_low": EPSILON, "epsilon_high": EPSILON}
    settings = LossSettings(**LOSSES[loss], **LIMITS[correction], **options)
    try:
        losses = token_losses(logprobs, torch.zeros_like(logprobs), inputs, settings)
    except ConfigError:
        return REFUSED
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return round(-gradient.item(), 9) + 0.0


def table() -> str:
    columns = " | ".join(f"ρ = {ratio:g}" for ratio in RATIOS)
    lines = [f"| loss | correction (C = {C:g}) | {columns} |", "|---|---|" + "---|" * len(RATIOS)]
    for loss in LOSSES:
        for correction in CORRECTIONS:
            found = [effective_weight(loss, correction, ratio) for ratio in RATIOS]
            cells = [value if isinstance(value, str) else f"{value:g}" for value in found]
            lines.append(f"| `{loss}` | `{correction}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_effective_weights_equal_the_definitions(loss: str, correction: str) -> None:
    for ratio in RATIOS:
        assert effective_weight(loss, correction, ratio) == pytest.approx(oracle(loss, correction, ratio)), ratio


def test_decoupled_ppo_truncated_at_two_counts_the_ratio_once() -> None:
    found = [effective_weight("decoupled_ppo", "token_tis", ratio) for ratio in RATIOS]
    assert found == pytest.approx([0.5, 1, 1.5, 2, 2, 2])


def test_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == table(), f"run python {Path(__file__).name}"


def test_refusal_says_why() -> None:
    logprobs = torch.zeros(1)
    inputs = TokenInputs(
        sampler_logprobs_K=logprobs,
        advantages_K=logprobs,
        weights_K=logprobs,
        segments_K=torch.zeros(1, dtype=torch.int64),
        num_segments=1,
    )
    with pytest.raises(ConfigError, match=r"token_tis.*ppo.*already holds.*proximal_every"):
        token_losses(logprobs, logprobs, inputs, LossSettings(policy_loss="ppo", token_tis=2.0))


if __name__ == "__main__":
    found = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    PAGE.write_text(found.sub(f"{BEGIN}\n\n{table()}\n\n{END}", PAGE.read_text()))
