"""Selective activation checkpointing: what of a decoder layer's forward pass its backward pass finds kept.

The results of matrix products and of fused attention are kept, because they cost nearly all of the time. The others
(norms, activations, rotary positions, casts) are computed again, because they take most of the memory.
"""

from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
"""Operators by name. Attention of another kind, and its scores, are computed again."""


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


keeping_products = partial(create_selective_checkpoint_contexts, _policy)
"""`context_fn` of ``torch.utils.checkpoint.checkpoint``."""
