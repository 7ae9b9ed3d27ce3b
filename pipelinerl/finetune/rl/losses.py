"""The built-in policy losses.

- PPO's clipped surrogate (arXiv:1707.06347) with separate bounds as in DAPO (arXiv:2503.14476), decoupled with a
  proximal policy as in AReaL (arXiv:2505.24298). The dual clip (arXiv:1912.09729) bounds the ratio where A < 0.
- GSPO (arXiv:2507.18071): PPO's clip on the sequence's geometric-mean ratio, which all its tokens share.
- REINFORCE with a bounded importance weight (PipelineRL, arXiv:2509.19128, equal to CISPO, arXiv:2506.13585).
"""

import torch
from torch import Tensor

from pipelinerl.finetune.rl.interface import PolicyTokens, TokenLoss, token_level
from pipelinerl.finetune.rl.tokens import bounded_exp


@token_level
def ppo(
    logprobs_K: Tensor, tokens: PolicyTokens, *, epsilon_low: float, epsilon_high: float, dual_clip: float
) -> TokenLoss:
    """−w·min(uA, clip(u, 1 − ε_low, 1 + ε_high)A), for A < 0 with u ≤ D.

    u = π/μ and w is a mask, or u = π/π_prox and w = π_prox/μ.
    """
    loss = clipped_surrogate(tokens.ratio(logprobs_K), tokens.advantages_K, epsilon_low, epsilon_high, dual_clip)
    return TokenLoss(tokens.outer_weight_K * loss.losses_K, loss.clipped_K)


def clipped_surrogate(
    ratio_K: Tensor, advantages_K: Tensor, epsilon_low: float, epsilon_high: float, dual_clip: float
) -> TokenLoss:
    """−min(uA, clip(u, 1 − ε_low, 1 + ε_high)A) of ratios u, and the tokens whose gradient a clip removes.

    For A < 0 it is at most −DA, where D is ``dual_clip`` > 1 + ε_high. The loss of A > 0 is constant there anyway.
    """
    above_K = (ratio_K > 1.0 + epsilon_high) & (advantages_K > 0)
    below_K = ((ratio_K < 1.0 - epsilon_low) | (ratio_K > dual_clip)) & (advantages_K < 0)
    ratio_K = ratio_K.clamp(max=dual_clip)
    bounded_K = ratio_K.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    return TokenLoss(-torch.minimum(ratio_K * advantages_K, bounded_K * advantages_K), above_K | below_K)


def gspo(
    logprobs_K: Tensor, tokens: PolicyTokens, *, epsilon_low: float, epsilon_high: float, dual_clip: float
) -> TokenLoss:
    """−w·min(sA, clip(s, 1 − ε_low, 1 + ε_high)A), with s = exp(mean of log u over the sequence), for A < 0 s ≤ D."""
    ratio_K = bounded_exp(tokens.sequence_mean(logprobs_K - tokens.reference_logprobs_K))
    loss = clipped_surrogate(ratio_K, tokens.advantages_K, epsilon_low, epsilon_high, dual_clip)
    # The gradient of s reaches every token of the sequence: one token with a large w moves all others.
    return TokenLoss(tokens.outer_weight_K * loss.losses_K, loss.clipped_K)


@token_level
def reinforce(logprobs_K: Tensor, tokens: PolicyTokens, *, ratio_clamp: float) -> TokenLoss:
    """−sg(min(ρ, c))·A·log π, where c is ``ratio_clamp``. A mask ρ·1[ρ ≤ C], if configured, replaces the clamp."""
    weight_K = tokens.weight_K
    clipped_K = weight_K > ratio_clamp
    if tokens.mask_bounds_weight:
        clipped_K = clipped_K & False
    else:
        weight_K = weight_K.clamp(max=ratio_clamp)
    return TokenLoss(-weight_K * tokens.advantages_K * logprobs_K, clipped_K)
