"""The whole objective of a micro-batch: policy loss + KL term − entropy bonus, weighted (docs/algorithms.md §2 to §4).

The loss of an optimizer batch is ``Σ weight_t · loss_t``. The weights contain the whole aggregation. Every term is a
pure function of constants and of the trained policy's log-probabilities, which carry the gradient. Every loss therefore
combines with KL, with entropy, and with each correction that is defined for it.

Shapes: K trained tokens of one micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.objectives import POLICY_LOSSES, keyword_arguments, loss_signature
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.corrections import Corrections
from pipelinerl.finetune.rl.interface import PolicyLoss, PolicyTokens, TokenLoss, is_token_level
from pipelinerl.finetune.rl.tokens import TokenInputs


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of ``finetune.rl`` that determine the loss of one optimizer step."""

    policy_loss: str = "reinforce"
    """Name in the registry, or dotted name of a function."""
    policy_loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    proximal: bool = False
    """Whether every loss takes its ratio to a proximal policy. `decoupled_ppo` always does."""
    ratio_clamp: float = 5.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float = 10.0
    token_tis: float | None = None
    sequence_tis: float | None = None
    token_mis: float | None = None
    token_mis_low: float | None = None
    sequence_mis: float | None = None
    veto: float | None = None
    kl_coef: float = 0.0
    kl_clamp: float = 5.0
    teacher_coef: float = 0.0
    teacher_top_k: int = 0
    reward_coef: float = 1.0
    entropy_bonus: float = 0.0

    @property
    def has_proximal(self) -> bool:
        known = POLICY_LOSSES.get(self.policy_loss)
        return self.proximal or (known is not None and known.proximal == "always")

    def names(self, figure: str) -> bool:
        """Whether the loss names this one of ``TOKEN_ARGUMENTS``."""
        return figure in loss_signature(self.policy_loss).figures

    @property
    def corrections(self) -> Corrections:
        return Corrections(**{name: getattr(self, name) for name in Corrections.__dataclass_fields__})

    @property
    def sequence_level(self) -> bool:
        """Whether a token's loss depends on the other tokens of its sequence."""
        return self.corrections.sequence_level or not is_token_level(find_loss(self.policy_loss))


def settings_at(cfg: Config, step: int) -> LossSettings:
    """Settings of optimizer step ``step`` (0-based).

    Coefficients change linearly and have their final values in the last step.
    """
    rl = cfg.finetune.rl
    done = step / max(cfg.finetune.max_train_steps - 1, 1)
    names = LossSettings.__dataclass_fields__.keys() - {"proximal"}
    settings = LossSettings(**{name: getattr(rl, name) for name in names}, proximal=cfg.proximal_steps is not None)
    return replace(
        settings,
        kl_coef=rl.kl_coef + (rl.final_kl_coef - rl.kl_coef) * done,
        entropy_bonus=rl.entropy_bonus + (rl.final_entropy_bonus - rl.entropy_bonus) * done,
    )


@cache
def find_loss(name: str) -> PolicyLoss:
    """The policy loss with this name in the registry, or with this dotted name."""
    return resolve_function(POLICY_LOSSES[name].function if name in POLICY_LOSSES else name)


def bound_loss(settings: LossSettings) -> Callable[[Tensor, PolicyTokens], TokenLoss | Tensor]:
    """The policy loss with its keyword arguments bound."""
    function, signature = find_loss(settings.policy_loss), loss_signature(settings.policy_loss)
    own = settings.policy_loss_kwargs
    return partial(function, **keyword_arguments("policy_loss", settings.policy_loss, signature, vars(settings), own))


def policy_term(
    logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings, entropy_K: Tensor | None = None
) -> tuple[TokenLoss, PolicyTokens]:
    """The policy loss of each token, and the ``PolicyTokens`` that it was computed from.

    Args:
        logprobs_K: of the trained policy, differentiable.
        inputs: constants of the tokens, and their values.
        entropy_K: of the trained policy, differentiable. None: the loss does not name it.
    Raises:
        ConfigError: a configured correction has no effect on this loss, or it names a figure that is not computed.
    """
    figures = loss_signature(settings.policy_loss).figures
    named = {name: _token_argument(name, inputs, settings, entropy_K) for name in figures}
    inputs = _taught(logprobs_K.detach(), inputs, settings)
    tokens = PolicyTokens(logprobs_K, inputs, settings.corrections, settings.has_proximal)
    found = bound_loss(settings)(logprobs_K, tokens, **named)
    loss = found if isinstance(found, TokenLoss) else TokenLoss(found)
    _refuse_unused_corrections(settings, tokens)
    return loss, tokens


def _taught(logprobs_K: Tensor, inputs: TokenInputs, settings: LossSettings) -> TokenInputs:
    """The inputs with a·A + b·(log π_T − log π) as advantages, whose gradient is that of a reward minus b·KL(π‖π_T).

    With the teacher's most likely tokens they are a·A, and the divergence is a term of its own.
    """
    if not settings.teacher_coef:
        return inputs
    if settings.teacher_top_k:
        return replace(inputs, advantages_K=settings.reward_coef * inputs.advantages_K)
    assert inputs.teacher_logprobs_K is not None, "a teacher's term without its log-probs would teach nothing"
    taught_K = settings.teacher_coef * (inputs.teacher_logprobs_K - logprobs_K)
    return replace(inputs, advantages_K=settings.reward_coef * inputs.advantages_K + taught_K)


def _token_argument(name: str, inputs: TokenInputs, settings: LossSettings, entropy_K: Tensor | None) -> Tensor:
    value_K = entropy_K if name == "entropy" else getattr(inputs, f"{name}_K")
    if value_K is None:
        raise ConfigError(
            f"`finetune.rl.policy_loss` {settings.policy_loss} names {name!r}, which this run does not compute: "
            f"{NEEDED[name]}"
        )
    return value_K


NEEDED = {
    "ref_logprobs": "give a reference server devices with `world.preprocessor_fraction`",
    "teacher_logprobs": "name a model in `teachers`",
    "values": "set `finetune.rl.advantage` to value",
    "entropy": "the caller has to pass it",
    "segments": "the caller has to pass them",
    "rewards": "the caller has to pass them",
    "lag": "the caller has to pass it",
}
"""What makes a run compute a figure."""


def _refuse_unused_corrections(settings: LossSettings, tokens: PolicyTokens) -> None:
    if settings.corrections.truncation is not None and not tokens.read_weights:
        name = "token_tis" if settings.token_tis is not None else "sequence_tis"
        given = f"`finetune.rl.{name}`={getattr(settings, name)} bounds the weight π/μ"
        if tokens.read_outer:
            raise ConfigError(
                f"{given}, but `finetune.rl.policy_loss` {settings.policy_loss} already holds that ratio in its clip "
                "and would count it twice: remove it, use a mask (token_mis, sequence_mis, veto), or set "
                "finetune.rl.proximal_every"
            )
        raise ConfigError(
            f"{given}, which `finetune.rl.policy_loss` {settings.policy_loss} does not read: it would have no effect; "
            "remove it, or let the loss multiply by tokens.weight_K"
        )
    if settings.corrections.masks and not (tokens.read_weights or tokens.read_masks):
        raise ConfigError(
            f"`finetune.rl.policy_loss` {settings.policy_loss} reads neither weight_K nor mask_K: token_mis, "
            "sequence_mis and veto would have no effect; remove them, or let the loss multiply by tokens.mask_K"
        )


def kl_k3(logprobs_K: Tensor, ref_logprobs_K: Tensor, clamp: float) -> Tensor:
    """[K] e^d − d − 1, where d = log π_ref − log π is clamped to ±clamp (k3, http://joschu.net/blog/kl-approx.html)."""
    d_K = (ref_logprobs_K - logprobs_K).clamp(-clamp, clamp)
    return d_K.exp() - d_K - 1.0


SMALLEST_REST = 1e-6
"""Least probability of all tokens outside a support: 1 − Σ in float32 is exact to about that."""


def support_kl(logprobs_KJ: Tensor, teacher_logprobs_KJ: Tensor) -> Tensor:
    """[K] KL(π‖π_T) over J tokens and one more for all others.

    At most the divergence over the vocabulary, and equal to it where the J tokens are the whole of it.
    """
    rest_K, teacher_rest_K = (
        (1.0 - given_KJ.exp().sum(-1)).clamp(min=SMALLEST_REST) for given_KJ in (logprobs_KJ, teacher_logprobs_KJ)
    )
    return (logprobs_KJ.exp() * (logprobs_KJ - teacher_logprobs_KJ)).sum(-1) + rest_K * (rest_K / teacher_rest_K).log()


def token_losses(
    logprobs_K: Tensor,
    entropy_K: Tensor,
    inputs: TokenInputs,
    settings: LossSettings,
    support_KJ: Tensor | None = None,
) -> Tensor:
    """[K] loss of each token: corrected policy loss + divergences − entropy bonus, without the token's weight.

    Args:
        logprobs_K, entropy_K: of the trained policy, differentiable.
        support_KJ: of the trained policy at the teacher's most likely tokens. None: there are none.
        inputs: constants of the tokens. Those that are imitated have the loss −weight · log π alone.
    """
    if inputs.supervised_K is not None:
        (played_N,) = torch.where(~inputs.supervised_K)
        played = replace(inputs[played_N], supervised_K=None)
        support_NJ = None if support_KJ is None else support_KJ[played_N]
        losses_N = token_losses(logprobs_K[played_N], entropy_K[played_N], played, settings, support_NJ)
        return (-inputs.advantages_K * logprobs_K).index_put((played_N,), losses_N)
    losses_K = policy_term(logprobs_K, inputs, settings, entropy_K)[0].losses_K
    if support_KJ is not None and settings.teacher_coef:
        assert inputs.teacher_top_logprobs_KJ is not None, "a support comes with the teacher's log-probs"
        losses_K = losses_K + settings.teacher_coef * support_kl(support_KJ, inputs.teacher_top_logprobs_KJ)
    if settings.kl_coef:
        assert inputs.ref_logprobs_K is not None, "a KL term without the reference's log-probs would be no KL term"
        losses_K = losses_K + settings.kl_coef * kl_k3(logprobs_K, inputs.ref_logprobs_K, settings.kl_clamp)
    if settings.entropy_bonus:
        losses_K = losses_K - settings.entropy_bonus * entropy_K
    return losses_K


@dataclass(frozen=True)
class PolicyObjective:
    """The weighted loss of a micro-batch. The output head calls it chunk by chunk or for all tokens at once."""

    inputs: TokenInputs
    settings: LossSettings
    sequence_level: bool = field(init=False)
    uses_entropy: bool = field(init=False)
    all_at_once: bool = field(init=False)

    def __post_init__(self) -> None:
        sequence_level = self.settings.sequence_level
        object.__setattr__(self, "all_at_once", sequence_level and self.inputs.group is not None)
        object.__setattr__(self, "sequence_level", sequence_level)
        object.__setattr__(self, "uses_entropy", self.settings.entropy_bonus != 0.0 or self.settings.names("entropy"))

    def __call__(
        self,
        logprobs_C: Tensor,
        entropy_C: Tensor,
        start: int,
        values_C: Tensor | None = None,
        support_CJ: Tensor | None = None,
    ) -> Tensor:
        inputs = self.inputs[start : start + logprobs_C.shape[0]]
        if values_C is not None:
            inputs = replace(inputs, values_K=values_C)
        return (inputs.weights_K * token_losses(logprobs_C, entropy_C, inputs, self.settings, support_CJ)).sum()
