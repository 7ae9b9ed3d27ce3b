"""The loss and the metrics of an optimizer step: a loop over tokens in float64, written from the documents alone.

The formulas are those of docs/algorithms.md §2, §3, §6 and of docs/metrics.md. The code that implements them was not
read for it. Every sequence is computed by itself, unpacked, by a model of transformers with eager attention.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from pipelinerl.config.sections import Config
from tests.oracle_batches import Member, Text

Reference = Callable[[Any], Sequence[float]]
"""Token ids → the reference model's log-probability of each token."""


# ---- §2 and §3: losses


class OraclePolicy:
    """A policy in float64 that computes one sequence at a time."""

    def __init__(self, lm: Any, value_head: Any, temperature: float):
        self.lm, self.value_head, self.temperature = lm, value_head, temperature

    def score(self, token_ids: Any, positions: Sequence[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Of the token at each position: log π, the entropy of its distribution, V before it."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        output = self.lm(ids[None], output_hidden_states=True)
        before = [position - 1 for position in positions]
        logits = output.logits[0, before] / self.temperature
        everything = logits - logits.logsumexp(1, keepdim=True)
        logps = everything[range(len(before)), ids[positions]]
        entropies = -(everything.exp() * everything).sum(1)
        values = [] if self.value_head is None else self.value_head(output.hidden_states[-1][0, before])[:, 0].unbind()
        return list(logps.unbind()), list(entropies.unbind()), list(values)

    def logprobs(self, token_ids: Any, positions: Sequence[int]) -> list[float]:
        with torch.no_grad():
            return [value.item() for value in self.score(token_ids, positions)[0]]


@dataclass
class Corrected:
    """The factor of a token, and what made it."""

    factor: float
    is_kept: bool
    is_corrected: bool
    is_clamped: bool


def corrected(ratios: Sequence[float], rl: Any) -> list[Corrected]:
    """The off-policy factors of a sequence's tokens, whose ratios are π/μ or π_prox/μ."""
    whole = math.exp(min(sum(map(math.log, ratios)), 700.0))
    by_sequence = rl.sequence_tis or rl.sequence_mis
    by_token = rl.token_tis or rl.token_mis
    is_masking = bool(rl.token_mis or rl.sequence_mis)
    bound = rl.token_tis or rl.sequence_tis or math.inf
    clamps = rl.policy_loss == "reinforce" and (not is_masking or bound < math.inf)
    found = []
    for ratio in ratios:
        weight = whole if by_sequence and not by_token else ratio
        is_kept = not (
            (rl.token_mis and ratio > rl.token_mis)
            or (rl.token_mis_low and ratio < rl.token_mis_low)
            or (rl.sequence_mis and whole > rl.sequence_mis)
            or (rl.veto and min(ratios) < rl.veto)
        )
        clamp = rl.ratio_clamp if clamps else math.inf
        factor = min(weight, clamp, bound) if is_kept else 0.0
        found.append(Corrected(factor, is_kept, not is_kept or weight > bound, is_kept and min(weight, bound) > clamp))
    return found


@dataclass
class TextLoss:
    """Losses of the trained tokens, and whether a clip or a correction acts on them."""

    losses: list[Tensor]
    clipped: list[bool]
    corrected: list[bool]


def policy_losses(
    text: Text, logps: list[Tensor], advantages: Sequence[float], proximal: Sequence[float] | None, cfg: Config
) -> TextLoss:
    """§2, with log π_prox of each token or None."""
    rl = cfg.finetune.rl
    anchor = text.mu if proximal is None else proximal
    numerator = [logp.item() for logp in logps] if proximal is None else proximal
    factors = corrected([math.exp(p - mu) for p, mu in zip(numerator, text.mu, strict=True)], rl)
    drops = [factor.is_corrected for factor in factors]
    if rl.policy_loss == "reinforce":
        losses = [-factor.factor * a * logp for factor, a, logp in zip(factors, advantages, logps, strict=True)]
        return TextLoss(losses, [factor.is_clamped for factor in factors], drops)
    changes = [logp - old for logp, old in zip(logps, anchor, strict=True)]
    if rl.policy_loss == "gspo":
        changes = [torch.stack(changes).mean()] * len(changes)
    losses, clipped = [], []
    for factor, a, change in zip(factors, advantages, changes, strict=True):
        ratio = change.exp()
        free, bounded = ratio * a, ratio.clamp(1 - rl.epsilon_low, 1 + rl.epsilon_high) * a
        surrogate, least = torch.min(free, bounded), rl.dual_clip * a if a < 0 else -math.inf
        outer = float(factor.is_kept) if proximal is None else factor.factor
        losses.append(-outer * surrogate.clamp(min=least))
        clipped.append(bool(bounded < free) or surrogate.item() < least)
    return TextLoss(losses, clipped, drops)


def coefficient(first: float, last: float, step: int, steps: int) -> float:
    return first + (last - first) * step / (steps - 1)


def k3_to_reference(logp: Tensor, reference: float, clamp: float) -> Tensor:
    d = (reference - logp).clamp(-clamp, clamp)
    return d.exp() - d - 1


# ---- the step


@dataclass
class Step:
    """The loss, whose gradient is the step's, and the metrics."""

    loss: Tensor
    metrics: dict[str, float]


@dataclass
class Seen:
    """Numbers of all trained tokens of a step, and of its sequences."""

    logratios: list[list[float]] = field(default_factory=list)
    lag0: list[bool] = field(default_factory=list)
    clipped: list[list[bool]] = field(default_factory=list)
    corrected: list[bool] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    kl_ref: list[float] = field(default_factory=list)
    value_losses: list[float] = field(default_factory=list)
    lags: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


def step_of(
    batch: Sequence[Member],
    policy: OraclePolicy,
    cfg: Config,
    step: int,
    proximal: OraclePolicy | None,
    reference: Reference | None,
) -> Step:
    """The step of a batch. ``proximal``: the policy before the first step of its block, if there is one."""
    rl, steps = cfg.finetune.rl, cfg.finetune.max_train_steps
    kl_coef = coefficient(rl.kl_coef, rl.final_kl_coef, step, steps)
    bonus = coefficient(rl.entropy_bonus, rl.final_entropy_bonus, step, steps)
    seen, loss = Seen(), torch.zeros((), dtype=torch.float64)
    texts = [text for member in batch for text in member.texts]
    for text in texts:
        logps, entropies, values = policy.score(text.sequence.token_ids, text.positions)
        own = [logp.item() for logp in logps]
        advantages = [text.reward - value.item() for value in values] or [text.advantage] * len(own)
        old = None if proximal is None else proximal.logprobs(text.sequence.token_ids, text.positions)
        policy_loss = policy_losses(text, logps, advantages, old, cfg)
        known = None if reference is None else reference(text.sequence.token_ids)
        for k, position in enumerate(text.positions):
            token_loss = policy_loss.losses[k] - bonus * entropies[k]
            if known is not None:
                divergence = k3_to_reference(logps[k], known[position], rl.kl_clamp)
                token_loss = token_loss + kl_coef * divergence
                seen.kl_ref.append(divergence.item())
            if values:
                value_loss = rl.value_loss_coef * 0.5 * (values[k] - text.reward) ** 2
                token_loss = token_loss + value_loss
                seen.value_losses.append(text.weight * value_loss.item())
            loss = loss + text.weight * token_loss
        note(seen, text, own, policy_loss, entropies, step)
    return Step(
        loss, metrics_of(seen) | {"loss": loss.item(), "reward": fmean(m.reward for m in batch for _ in m.texts)}
    )


def note(seen: Seen, text: Text, own: list[float], policy_loss: TextLoss, entropies: list[Tensor], step: int) -> None:
    seen.logratios.append([logp - mu for logp, mu in zip(own, text.mu, strict=True)])
    seen.lag0.append(set(text.versions) == {step})
    seen.clipped.append(policy_loss.clipped)
    seen.corrected += policy_loss.corrected
    seen.entropies += [value.item() for value in entropies]
    newest = max(text.versions)
    seen.lags["trained"] += [step - version for version in text.versions]
    seen.lags["in_flight"] += [newest - version for version in text.versions]
    seen.lags["queued"] += [step - newest for _ in text.versions]


def effective_share(logratios: Sequence[float]) -> float:
    """(Σρ)² / (N Σρ²), in units of the largest ρ."""
    largest = max(logratios)
    ratios = [math.exp(value - largest) for value in logratios]
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))


BINS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9-16": (9, 16), "17+": (17, 10**9)}


def metrics_of(seen: Seen) -> dict[str, float]:
    """§6."""
    logratios = [value for values in seen.logratios for value in values]
    ratios = [math.exp(value) for value in logratios]
    clipped = [value for values in seen.clipped for value in values]
    fresh = [k for k, is_fresh in enumerate(seen.lag0) if is_fresh]
    fresh_clipped = [value for k in fresh for value in seen.clipped[k]]
    metrics = {
        "tokens": len(logratios),
        "sequences": len(seen.logratios),
        "ess": effective_share(logratios),
        "ess_sequence": effective_share([sum(values) for values in seen.logratios]),
        "kl_k1": -fmean(logratios),
        "kl_k3": fmean(ratio - value - 1 for ratio, value in zip(ratios, logratios, strict=True)),
        "chi_squared": fmean(ratio**2 for ratio in ratios) - 1,
        "logratio_abs_mean": fmean(map(abs, logratios)),
        "logratio_abs_max": max(map(abs, logratios)),
        "clip_fraction": fmean(clipped),
        "corrected_fraction": fmean(seen.corrected),
        "entropy": fmean(seen.entropies),
        "lag_min": min(seen.lags["trained"]),
        "lag_max": max(seen.lags["trained"]),
        "lag_mean": fmean(seen.lags["trained"]),
        "lag_in_flight_mean": fmean(seen.lags["in_flight"]),
        "lag_queued_mean": fmean(seen.lags["queued"]),
    }
    if fresh:
        metrics["logratio_abs_max_lag0"] = max(abs(value) for k in fresh for value in seen.logratios[k])
        metrics["clip_fraction_lag0"] = fmean(fresh_clipped)
    if seen.kl_ref:
        metrics["kl_ref"] = fmean(seen.kl_ref)
    if seen.value_losses:
        metrics["value_loss"] = sum(seen.value_losses)
    for part, lags in seen.lags.items():
        for name, (low, high) in BINS.items():
            metrics[f"lag_histogram/{part}/{name}"] = fmean(low <= lag <= high for lag in lags)
    return metrics
