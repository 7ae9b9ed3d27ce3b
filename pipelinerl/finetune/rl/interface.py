"""The interface of a policy loss, for the built-in losses and for your own.

A policy loss is a function ``loss(logprobs_K, tokens, *, …) -> TokenLoss`` (or the [K] losses alone). It returns one
number per trained token, which is minimised. The loss handles advantages and ratios. KL, entropy and aggregation are
added to every loss in the same way. A parameter with a name of ``TOKEN_ARGUMENTS`` gets that figure of every token.
Other keyword-only parameters come from the configuration: from the key of `finetune.rl` with the same name, else from
`finetune.rl.policy_loss_kwargs`.

Shapes: K trained tokens of one micro-batch.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.corrections import Corrected, Corrections, corrected
from pipelinerl.finetune.rl.tokens import TokenInputs, bounded_exp, discounted_sum, segment_sum

LARGEST_PROXIMAL_WEIGHT = 100.0
"""Bound of π_prox/μ where no correction bounds it. A loss multiplies by this ratio outside of its clip."""


class TokenLoss(NamedTuple):
    """Result of a policy loss."""

    losses_K: Tensor
    """Loss of each token, differentiable with respect to the log-probabilities."""
    clipped_K: Tensor | None = None
    """bool: where the loss's own clip acts (metric `clip_fraction`). None: it has no clip."""


class PolicyTokens:
    """Constants and ratios of the trained tokens, for use in a loss. Only ``ratio`` has a gradient."""

    def __init__(self, logprobs_K: Tensor, inputs: TokenInputs, corrections: Corrections, proximal: bool):
        self._inputs, self._corrections = inputs, corrections
        self._logprobs_K = logprobs_K.detach()
        self.has_proximal = proximal
        """Whether the denominator of ``ratio`` is a proximal policy instead of the sampler."""
        self.read_weights = self.read_masks = self.read_outer = False

    @property
    def advantages_K(self) -> Tensor:
        return self._inputs.advantages_K

    @property
    def sampler_logprobs_K(self) -> Tensor:
        """log μ, the log-probabilities of the policy that sampled the tokens."""
        return self._inputs.sampler_logprobs_K

    @property
    def reference_logprobs_K(self) -> Tensor:
        """Log of the denominator of ``ratio``: log π_prox with a proximal policy, else log μ."""
        return self._proximal_logprobs_K if self.has_proximal else self.sampler_logprobs_K

    @property
    def weight_K(self) -> Tensor:
        """π/μ, or π_prox/μ with a proximal policy, corrected: the factor of −A·log π in a policy gradient.

        π_prox/μ is at most ``LARGEST_PROXIMAL_WEIGHT`` if no correction has another bound. π/μ is then unbounded.
        """
        self.read_weights = True
        return self._corrected.weight_K

    @property
    def mask_K(self) -> Tensor:
        """0 where a correction drops the token, else 1. For a loss that already contains π/μ."""
        self.read_masks = True
        return self._corrected.mask_K

    @property
    def outer_weight_K(self) -> Tensor:
        """Factor of a loss in ``ratio``: the corrected π_prox/μ, or the mask alone if ``ratio`` is π/μ itself."""
        self.read_outer = True
        return self.weight_K if self.has_proximal else self.mask_K

    @property
    def mask_bounds_weight(self) -> bool:
        """Whether a mask bounds ``weight_K`` (ρ·1[ρ ≤ C]), so that it needs no clamp."""
        return self._corrections.mask_bounds_weight

    @property
    def corrected_K(self) -> Tensor:
        """bool: tokens that a correction truncates or drops."""
        return self._corrected.changed_K

    def ratio(self, logprobs_K: Tensor) -> Tensor:
        """[K] π_θ over the reference policy, differentiable, bounded to avoid overflow of float32."""
        return bounded_exp(logprobs_K - self.reference_logprobs_K)

    def sequence_mean(self, values_K: Tensor) -> Tensor:
        """[K] mean over the trained tokens of each token's sequence. Not for a loss that is ``token_level``."""
        counts_S = segment_sum(torch.ones_like(values_K), self._inputs).clamp(min=1.0)
        return (segment_sum(values_K, self._inputs) / counts_S)[self._inputs.segments_K]

    def gae(
        self, values: Tensor, rewards: Tensor, *, discount: float = 1.0, decay: float = 0.95
    ) -> tuple[Tensor, Tensor]:
        """Generalised advantage estimates (arXiv:1506.02438) and the returns that the values should predict.

        An episode is a training sequence, a step one of its trained tokens. The sequence's reward comes with its last
        one. A cut answer is bootstrapped from the value of its last state.

        Args:
            values, rewards: [K], the loss's arguments of these names.
            discount: γ
            decay: λ
        Returns:
            (advantages [K], advantages + values [K]), both constants.
        Raises:
            ConfigError: other ranks hold tokens of these sequences.
        """
        inputs, segments_K, values_K = self._inputs, self._inputs.segments_K, values.detach()
        if inputs.group is not None:
            raise ConfigError("`gae` needs whole sequences on one rank: set `finetune.seq_parallel` to 1")
        goes_on_K = F.pad(segments_K[1:] == segments_K[:-1], (0, 1))[: len(segments_K)]
        after_K = F.pad(values_K, (0, 1))[1:]
        bootstrap_S = inputs.bootstrap_S
        ends_K = torch.zeros_like(values_K) if bootstrap_S is None else bootstrap_S[segments_K].to(values_K.dtype)
        next_K = torch.where(goes_on_K, after_K, ends_K)
        deltas_K = torch.where(goes_on_K, 0.0, rewards) + discount * next_K - values_K
        advantages_K = discounted_sum(deltas_K, discount * decay, segments_K)
        return advantages_K, advantages_K + values_K

    @property
    def _proximal_logprobs_K(self) -> Tensor:
        given_K = self._inputs.proximal_logprobs_K
        return self._logprobs_K if given_K is None else given_K

    @cached_property
    def _corrected(self) -> Corrected:
        base_K = self._proximal_logprobs_K if self.has_proximal else self._logprobs_K
        largest = LARGEST_PROXIMAL_WEIGHT if self.has_proximal else None
        return corrected(base_K - self.sampler_logprobs_K, self._inputs, self._corrections, largest)


PolicyLoss = Callable[..., TokenLoss | Tensor]


def token_level(function: PolicyLoss) -> PolicyLoss:
    """Mark a loss in which a token's loss depends on no other token.

    The output head then calls it for one chunk of tokens at a time. Without the mark it is called for all tokens of a
    micro-batch at once. If these exceed `finetune.head_chunk_tokens`, this costs a second pass over the head.
    """
    function.token_level = True  # type: ignore[attr-defined]
    return function


def is_token_level(function: Callable[..., Any]) -> bool:
    """Whether ``token_level`` marked the loss ``function``."""
    return bool(getattr(function, "token_level", False))
