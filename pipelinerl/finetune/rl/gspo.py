"""GSPO (arXiv:2507.18071): PPO's clip on the sequence's geometric-mean ratio, which all its tokens share."""

from torch import Tensor

from pipelinerl.finetune.rl.interface import PolicyTokens, TokenLoss
from pipelinerl.finetune.rl.ppo import clipped_surrogate
from pipelinerl.finetune.rl.tokens import bounded_exp


def gspo(logprobs_K: Tensor, tokens: PolicyTokens, *, epsilon_low: float, epsilon_high: float) -> TokenLoss:
    """−w·min(sA, clip(s, 1 − ε_low, 1 + ε_high)A), with s = exp(mean of log u over the sequence)."""
    ratio_K = bounded_exp(tokens.sequence_mean(logprobs_K - tokens.reference_logprobs_K))
    loss = clipped_surrogate(ratio_K, tokens.advantages_K, epsilon_low, epsilon_high)
    return TokenLoss(tokens.outer_weight_K * loss.losses_K, loss.clipped_K)
