"""PPO's clipped surrogate (arXiv:1707.06347) with separate bounds as in DAPO (arXiv:2503.14476).

With a proximal policy it is decoupled as in AReaL (arXiv:2505.24298).
"""

import torch
from torch import Tensor

from pipelinerl.finetune.rl.interface import PolicyTokens, TokenLoss, token_level


@token_level
def ppo(logprobs_K: Tensor, tokens: PolicyTokens, *, epsilon_low: float, epsilon_high: float) -> TokenLoss:
    """−w·min(uA, clip(u, 1 − ε_low, 1 + ε_high)A). u = π/μ and w is a mask, or u = π/π_prox and w = π_prox/μ."""
    loss = clipped_surrogate(tokens.ratio(logprobs_K), tokens.advantages_K, epsilon_low, epsilon_high)
    return TokenLoss(tokens.outer_weight_K * loss.losses_K, loss.clipped_K)


def clipped_surrogate(ratio_K: Tensor, advantages_K: Tensor, epsilon_low: float, epsilon_high: float) -> TokenLoss:
    """−min(uA, clip(u, 1 − ε_low, 1 + ε_high)A) of ratios u, and the tokens whose gradient the clip removes."""
    bounded_K = ratio_K.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    above_K = (ratio_K > 1.0 + epsilon_high) & (advantages_K > 0)
    below_K = (ratio_K < 1.0 - epsilon_low) & (advantages_K < 0)
    return TokenLoss(-torch.minimum(ratio_K * advantages_K, bounded_K * advantages_K), above_K | below_K)
