"""Policy losses, corrections, KL and entropy terms of docs/algorithms.md §2 and §3.

A loss is a per-token number to be minimised; the loss of an optimizer batch is ``Σ weight_t · loss_t``, where the
weight carries the whole aggregation (§4). Every term is a pure function of the trained policy's log-probabilities
(differentiable) and of constants, so that every loss composes with every correction, with KL and with entropy.

Shapes: K trained tokens of one micro-batch, S its segments (a segment is one training sequence).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.config.sections import RLSection

LARGEST_EXPONENT = 80.0
"""exp() of more is not a float32: log-ratios are bounded here inside losses (diagnostics are not)."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The part of ``finetune.rl`` that shapes the loss of one optimizer step."""

    policy_loss: str = "reinforce"
    ratio_clamp: float = 5.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    token_tis: float | None = None
    sequence_tis: float | None = None
    token_mis: float | None = None
    sequence_mis: float | None = None
    veto: float | None = None
    kl_coef: float = 0.0
    kl_clamp: float = 5.0
    entropy_bonus: float = 0.0

    @property
    def sequence_level(self) -> bool:
        """Whether a token's loss depends on the other tokens of its sequence."""
        return self.policy_loss == "gspo" or any(
            x is not None for x in (self.sequence_tis, self.sequence_mis, self.veto)
        )


def settings_at(rl: RLSection, step: int, max_train_steps: int) -> LossSettings:
    """Settings of optimizer step ``step``: coefficients decay linearly and reach their final value in the last step."""
    done = step / max(max_train_steps - 1, 1)
    settings = LossSettings(**{name: getattr(rl, name) for name in LossSettings.__dataclass_fields__})
    return replace(
        settings,
        kl_coef=rl.kl_coef + (rl.final_kl_coef - rl.kl_coef) * done,
        entropy_bonus=rl.entropy_bonus + (rl.final_entropy_bonus - rl.entropy_bonus) * done,
    )


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share the tokens of a micro-batch (`finetune.seq_parallel`)."""

    group: dist.ProcessGroup
    index: int
    """This rank's place, and that of its slice."""
    size: int


class _GroupSum(torch.autograd.Function):
    """Sum over the ranks of a group; every rank's loss depends on it, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Constants of the trained tokens of one micro-batch."""

    sampler_logprobs_K: Tensor
    """log μ"""
    advantages_K: Tensor
    weights_K: Tensor
    """Weight of each token in the optimizer batch's loss."""
    segments_K: Tensor
    """int64, ascending: index of the token's segment."""
    num_segments: int
    ref_logprobs_K: Tensor | None = None
    group: SequenceGroup | None = None
    """Ranks that hold the other tokens of these segments; None = all are here."""

    def __getitem__(self, rows: slice) -> "TokenInputs":
        ref = self.ref_logprobs_K
        return TokenInputs(
            sampler_logprobs_K=self.sampler_logprobs_K[rows],
            advantages_K=self.advantages_K[rows],
            weights_K=self.weights_K[rows],
            segments_K=self.segments_K[rows],
            num_segments=self.num_segments,
            ref_logprobs_K=None if ref is None else ref[rows],
            group=self.group,
        )


@dataclass(frozen=True, kw_only=True)
class LagInputs:
    """Lag of the trained tokens of a micro-batch: optimizer steps between sampling and training."""

    lag_K: Tensor
    """int64"""
    in_flight_K: Tensor
    """int64: the part of it that passed while the sequence was still being sampled."""


def segment_sum(values_K: Tensor, inputs: TokenInputs) -> Tensor:
    """[S] sums over the trained tokens of each segment. Collective within the inputs' group."""
    sums_S = values_K.new_zeros(inputs.num_segments).index_add(0, inputs.segments_K, values_K)
    return sums_S if inputs.group is None else _GroupSum.apply(sums_S, inputs.group.group)


def _exp(log_K: Tensor) -> Tensor:
    return log_K.clamp(max=LARGEST_EXPONENT).exp()


def _reinforce(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> Tensor:
    """−sg(min(ρ, c))·A·log π (PipelineRL arXiv:2509.19128; CISPO arXiv:2506.13585)."""
    ratio_K = _exp(logprobs_K.detach() - inputs.sampler_logprobs_K).clamp(max=settings.ratio_clamp)
    return -ratio_K * inputs.advantages_K * logprobs_K


def _clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A) (PPO arXiv:1707.06347; asymmetric: DAPO arXiv:2503.14476)."""
    clipped = ratio.clamp(1.0 - settings.epsilon_low, 1.0 + settings.epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _ppo(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> Tensor:
    return _clipped(_exp(logprobs_K - inputs.sampler_logprobs_K), inputs.advantages_K, settings)


def _gspo(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> Tensor:
    """PPO's clip on the sequence's geometric-mean ratio, the same for each of its tokens (GSPO arXiv:2507.18071)."""
    return _clipped(_exp(_sequence_mean_log_ratio(logprobs_K, inputs)), inputs.advantages_K, settings)


def _sequence_mean_log_ratio(logprobs_K: Tensor, inputs: TokenInputs) -> Tensor:
    """[K] mean log-ratio of the token's sequence."""
    log_ratio_K = logprobs_K - inputs.sampler_logprobs_K
    counts_S = segment_sum(torch.ones_like(log_ratio_K), inputs).clamp(min=1.0)
    return (segment_sum(log_ratio_K, inputs) / counts_S)[inputs.segments_K]


def _decoupled_ppo(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> Tensor:
    """−sg(π_prox/μ)·min(uA, clip(u)A), u = π_θ/π_prox (AReaL arXiv:2505.24298).

    π_prox is the policy before the optimizer step, and an optimizer batch is trained in one step: u is 1 in value
    and carries the gradient.
    """
    proximal_K = logprobs_K.detach()
    behaviour_K = _exp(proximal_K - inputs.sampler_logprobs_K)
    return behaviour_K * _clipped((logprobs_K - proximal_K).exp(), inputs.advantages_K, settings)


POLICY_LOSSES = {"reinforce": _reinforce, "ppo": _ppo, "gspo": _gspo, "decoupled_ppo": _decoupled_ppo}


def correction_weights(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> Tensor | None:
    """Product of the configured corrections, without gradient; None when none is configured.

    Token TIS min(ρ, C), token MIS ρ·1[ρ ≤ C]; the sequence forms take ρ as the product over the sequence's tokens;
    veto drops a sequence that has any ρ below the threshold.
    """
    log_ratio_K = (logprobs_K - inputs.sampler_logprobs_K).detach()
    factors = []
    if settings.token_tis is not None:
        factors.append(_truncated(log_ratio_K, settings.token_tis))
    if settings.token_mis is not None:
        factors.append(_masked(log_ratio_K, settings.token_mis))
    if settings.sequence_tis is not None or settings.sequence_mis is not None:
        log_ratio_S = segment_sum(log_ratio_K, inputs)
        if settings.sequence_tis is not None:
            factors.append(_truncated(log_ratio_S, settings.sequence_tis)[inputs.segments_K])
        if settings.sequence_mis is not None:
            factors.append(_masked(log_ratio_S, settings.sequence_mis)[inputs.segments_K])
    if settings.veto is not None:
        vetoed_S = segment_sum((log_ratio_K < math.log(settings.veto)).to(log_ratio_K.dtype), inputs) > 0
        factors.append((~vetoed_S).to(log_ratio_K.dtype)[inputs.segments_K])
    if not factors:
        return None
    return torch.stack(factors).prod(0)


def _truncated(log_ratio: Tensor, limit: float) -> Tensor:
    return log_ratio.clamp(max=math.log(limit)).exp()


def _masked(log_ratio: Tensor, limit: float) -> Tensor:
    kept = log_ratio <= math.log(limit)
    return torch.where(kept, log_ratio.clamp(max=math.log(limit)).exp(), 0.0)


def kl_k3(logprobs_K: Tensor, ref_logprobs_K: Tensor, clamp: float) -> Tensor:
    """e^d − d − 1 with d = log π_ref − log π clamped at ±clamp (k3; http://joschu.net/blog/kl-approx.html)."""
    d_K = (ref_logprobs_K - logprobs_K).clamp(-clamp, clamp)
    return d_K.exp() - d_K - 1.0


def token_losses(logprobs_K: Tensor, entropy_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> Tensor:
    """[K] loss of each token: corrected policy loss + KL term − entropy bonus, before the token's weight."""
    losses_K = POLICY_LOSSES[settings.policy_loss](logprobs_K, inputs, settings)
    correction_K = correction_weights(logprobs_K, inputs, settings)
    if correction_K is not None:
        losses_K = losses_K * correction_K
    if settings.kl_coef:
        assert inputs.ref_logprobs_K is not None, "a KL term without the reference's log-probs would be no KL term"
        losses_K = losses_K + settings.kl_coef * kl_k3(logprobs_K, inputs.ref_logprobs_K, settings.kl_clamp)
    if settings.entropy_bonus:
        losses_K = losses_K - settings.entropy_bonus * entropy_K
    return losses_K


def clipped_tokens(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> Tensor:
    """[K] bool: tokens whose ratio the policy loss clips (the clip acts on value or gradient)."""
    if settings.policy_loss == "decoupled_ppo":
        return torch.zeros_like(logprobs_K, dtype=torch.bool)
    if settings.policy_loss == "reinforce":
        return logprobs_K - inputs.sampler_logprobs_K > math.log(settings.ratio_clamp)
    if settings.policy_loss == "gspo":
        ratio_K = _exp(_sequence_mean_log_ratio(logprobs_K, inputs))
    else:
        ratio_K = _exp(logprobs_K - inputs.sampler_logprobs_K)
    above_K = (ratio_K > 1.0 + settings.epsilon_high) & (inputs.advantages_K > 0)
    below_K = (ratio_K < 1.0 - settings.epsilon_low) & (inputs.advantages_K < 0)
    return above_K | below_K


@dataclass(frozen=True)
class PolicyObjective:
    """The weighted loss of a micro-batch as the output head evaluates it, chunk by chunk or at once."""

    inputs: TokenInputs
    settings: LossSettings
    sequence_level: bool = field(init=False)
    uses_entropy: bool = field(init=False)
    all_at_once: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_at_once", self.settings.sequence_level and self.inputs.group is not None)
        object.__setattr__(self, "sequence_level", self.settings.sequence_level)
        object.__setattr__(self, "uses_entropy", self.settings.entropy_bonus != 0.0)

    def __call__(self, logprobs_C: Tensor, entropy_C: Tensor, start: int) -> Tensor:
        inputs = self.inputs[start : start + logprobs_C.shape[0]]
        return (inputs.weights_K * token_losses(logprobs_C, entropy_C, inputs, self.settings)).sum()
