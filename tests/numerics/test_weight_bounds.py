"""Every loss × correction × proximal setting bounds a token's weight, whatever the ratios are (docs/algorithms.md §2).

The weight of a token is |∂ Σ losses / ∂ log π| for advantages of ±1. A loss declares its bounds in the registry. What
corrections and a proximal policy make of them is written here, from the definitions. The ratios π/μ, π_prox/μ and
π/π_prox of every token are e^±200, 0, and numbers on both sides of each bound, in float32.
`python -m tests.numerics.test_weight_bounds` writes the table of docs/algorithms.md.
"""

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelinerl.config.load import compose, validate
from pipelinerl.config.objectives import POLICY_LOSSES
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.objective import LossSettings, settings_at, token_losses
from pipelinerl.finetune.rl.tokens import TokenInputs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- begin: written by tests/numerics/test_weight_bounds.py -->", "<!-- end of the bounds -->"
C_TIS, C_MIS, LARGEST = 2.0, 3.0, 100.0
ONE_EACH = {"token_tis": C_TIS, "sequence_tis": C_TIS, "token_mis": C_MIS, "sequence_mis": C_MIS, "veto": 1e-4}
SYMBOLS = {"ratio_clamp": "c", "epsilon_high": "ε_high", "epsilon_low": "ε_low", "dual_clip": "D"}
"""Keys for which docs/algorithms.md has a symbol."""
CORRECTIONS = [
    chosen
    for count in range(len(ONE_EACH) + 1)
    for chosen in itertools.combinations(ONE_EACH, count)
    if not {"token_tis", "sequence_tis"} <= set(chosen)
]
NEVER = [(loss, False) for loss, known in POLICY_LOSSES.items() if known.proximal != "always"]
SHARED = [(loss, True) for loss, known in POLICY_LOSSES.items() if known.proximal != "never"]
LOG_RATIOS = (-200.0, -30.0, math.log(0.79), 0.0, 0.15, math.log(1.19), math.log(1.99), math.log(9.9), 8.0, 200.0)


@dataclass(frozen=True)
class Bounds:
    """Largest weight of a token with A > 0, and with A < 0."""

    positive: float
    negative: float


def expected(loss: str, proximal: bool, chosen: tuple[str, ...]) -> Bounds | None:
    """From the definitions. None: the combination is refused."""
    truncated, masked = [name for name in chosen if "tis" in name], [name for name in chosen if "mis" in name]
    known = POLICY_LOSSES[loss]
    positive, negative = (eval(formula, {}, vars(LossSettings())) for formula in known.bounds)
    if known.reads_weight:
        bounds = (min(own, C_TIS) if truncated else C_MIS if masked else own for own in (positive, negative))
        return Bounds(*bounds)
    if not proximal:
        return None if truncated else Bounds(positive, negative)
    outer = C_TIS if truncated else C_MIS if masked else LARGEST
    return Bounds(outer * positive, outer * negative)


def settings_of(loss: str, proximal: bool, chosen: tuple[str, ...]) -> LossSettings:
    options: dict[str, Any] = {name: ONE_EACH[name] for name in chosen}
    return LossSettings(policy_loss=loss, proximal=proximal, **options)


def weights_of(settings: LossSettings, log_mu: Tensor, log_prox: Tensor | None, advantages: Tensor) -> Tensor:
    """|∂ Σ losses / ∂ log π| in float32 of sequences of five tokens with log π = −1."""
    logprobs = torch.full_like(log_mu, -1.0).requires_grad_()
    inputs = TokenInputs(
        sampler_logprobs_K=log_mu,
        advantages_K=advantages,
        weights_K=torch.ones_like(log_mu),
        segments_K=torch.arange(len(log_mu)) // 5,
        num_segments=-(-len(log_mu) // 5),
        proximal_logprobs_K=log_prox,
    )
    losses = token_losses(logprobs, torch.zeros_like(logprobs), inputs, settings)
    assert torch.isfinite(losses).all()
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return gradient.abs()


def largest_weight(settings: LossSettings, sign: float, *, own: bool) -> float:
    """Over sequences in which all five tokens, or the first alone, have each pair of log(π/μ) and log(π/π_prox)."""
    found = 0.0
    pairs = torch.tensor(list(itertools.product(LOG_RATIOS, LOG_RATIOS)), dtype=torch.float32)
    for repeats in ([1.0] * 5, [1.0, 0.0, 0.0, 0.0, 0.0]):
        shape = torch.tensor(repeats)
        to_mu, to_prox = ((pairs[:, column, None] * shape).flatten() for column in (0, 1))
        prox = None if own else -1.0 - to_prox
        weights = weights_of(settings, -1.0 - to_mu, prox, torch.full_like(to_mu, sign))
        assert torch.isfinite(weights).all()
        found = max(found, weights.max().item())
    return found


def product() -> list[Any]:
    return [
        pytest.param(loss, proximal, chosen, id=f"{loss}-{'proximal' if proximal else 'sampler'}-{'+'.join(chosen)}")
        for loss, proximal in [*NEVER, *SHARED]
        for chosen in CORRECTIONS
    ]


@pytest.mark.parametrize(("loss", "proximal", "chosen"), product())
def test_weight_is_bounded_for_any_ratio(loss: str, proximal: bool, chosen: tuple[str, ...]) -> None:
    settings, bounds = settings_of(loss, proximal, chosen), expected(loss, proximal, chosen)
    for own in (True, False) if proximal else (True,):
        if bounds is None:
            with pytest.raises(ConfigError, match=r"count it twice|would have no effect"):
                largest_weight(settings, 1.0, own=own)
            continue
        for sign, bound in ((1.0, bounds.positive), (-1.0, bounds.negative)):
            assert largest_weight(settings, sign, own=own) <= bound * (1 + 1e-5), f"A = {sign}, own = {own}"


@pytest.mark.parametrize(("loss", "proximal"), [*NEVER, *SHARED])
@pytest.mark.parametrize("chosen", [(), ("token_tis",)])
def test_bound_is_the_lowest(loss: str, proximal: bool, chosen: tuple[str, ...]) -> None:
    bounds = expected(loss, proximal, chosen)
    if bounds is not None:
        for sign, bound in ((1.0, bounds.positive), (-1.0, bounds.negative)):
            found = largest_weight(settings_of(loss, proximal, chosen), sign, own=not proximal)
            assert found >= 0.98 * bound, f"A = {sign}"


def test_negative_advantage_with_a_huge_ratio_has_no_gradient() -> None:
    """ρ = 9.9 still pushes with 9.9; beyond D = 10 the loss is the constant 10."""
    log_ratios = torch.tensor([math.log(9.9), math.log(10.1), 8.0, 80.0, 200.0])
    for loss in ("ppo", "decoupled_ppo"):
        prox = None if loss == "ppo" else -1.0 - log_ratios
        mu = -1.0 - log_ratios if loss == "ppo" else prox
        assert mu is not None
        found = weights_of(settings_of(loss, loss != "ppo", ()), mu, prox, torch.full((5,), -1.0))
        torch.testing.assert_close(found, torch.tensor([9.9, 0.0, 0.0, 0.0, 0.0]), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", ["gspo", "decoupled_ppo", "ppo", "grpo", "base", "scalerl", "pipelinerl"])
def test_shipped_preset_lets_no_token_push_its_neighbours(name: str) -> None:
    """One token of ρ = e⁸ among four: without truncation GSPO gave each the weight (e⁸ + 3) / 4 = 746."""
    required = ["output_dir=x", "dataset_loader=os.getcwd", "actor.rollout_policy=os.getcwd"]
    settings = settings_at(validate(compose("base", [f"finetune={name}", *required])), 0)
    log_mu = torch.tensor([-9.0, -1.0, -1.0, -1.0])
    for sign in (1.0, -1.0):
        found = weights_of(settings, log_mu, None, torch.full((4,), sign))
        assert found[1:].max() <= 2.0
        assert found[0] <= 5.0


def test_gspo_preset_weighs_the_sequence_by_its_truncated_ratio() -> None:
    """The step after π_prox's own: w = min(Π π_prox/μ, 2) for all tokens, and the clip at 1 + 4e-4 acts on s."""
    required = ["output_dir=x", "dataset_loader=os.getcwd", "actor.rollout_policy=os.getcwd"]
    cfg = validate(compose("base", ["finetune=gspo", *required]))
    assert (cfg.proximal_steps, cfg.finetune.rl.sequence_tis) == (4, 2.0)
    settings = settings_at(cfg, 0)
    drift = torch.tensor([1e-4, 2e-4, 0.0, 1e-4, 1e-4] + [1e-3] * 5)  # means 1e-4 and 1e-3
    log_prox = -1.0 - drift
    log_mu = log_prox - torch.tensor([0.1, -0.3, 0.4, 0.0, 0.1] + [1.0] * 5)  # sums 0.3 and 5
    found = weights_of(settings, log_mu, log_prox, torch.ones(10))
    expected_weight = math.exp(0.3) * math.exp(1e-4)
    torch.testing.assert_close(found, torch.tensor([expected_weight] * 5 + [0.0] * 5), rtol=1e-4, atol=1e-7)


def table() -> str:
    lines = ["| loss | ratio of the clip to | correction | A > 0 | A < 0 |", "|---|---|---|---|---|"]
    kinds = {"none, `veto`": (), "`token_tis`, `sequence_tis`: C": ("token_tis",), "masks alone: C": ("token_mis",)}
    for loss, proximal in [*NEVER, *SHARED]:
        for title, chosen in kinds.items():
            if expected(loss, proximal, chosen) is None:
                continue
            bounds = [corrected(loss, proximal, title, formula) for formula in POLICY_LOSSES[loss].bounds]
            reference = "–" if POLICY_LOSSES[loss].proximal == "never" else "π_prox" if proximal else "μ"
            lines.append(f"| `{loss}` | {reference} | {title} | {' | '.join(bounds)} |")
    return "\n".join(lines)


def corrected(loss: str, proximal: bool, title: str, formula: str) -> str:
    """The formula of a bound in the page's symbols, with the correction of a row."""
    own = re.sub(r"[a-z]\w*", lambda key: SYMBOLS.get(key[0], f"`{key[0]}`"), formula)
    if POLICY_LOSSES[loss].reads_weight:
        return f"min({own}, C)" if "tis" in title else "C" if "masks" in title else own
    if not proximal:
        return own
    outer = f"{LARGEST:g}" if "none" in title else "C"
    return f"{outer} · ({own})" if " + " in own else f"{outer} · {own}"


def test_page_has_the_bounds() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() == table(), "run `make format`"


if __name__ == "__main__":
    found = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    PAGE.write_text(found.sub(f"{BEGIN}\n\n{table()}\n\n{END}", PAGE.read_text()))
