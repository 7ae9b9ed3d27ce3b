"""REINFORCE with a bounded importance weight (PipelineRL, arXiv:2509.19128, equal to CISPO, arXiv:2506.13585)."""

from torch import Tensor

from pipelinerl.finetune.rl.interface import PolicyTokens, TokenLoss, token_level


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
