"""Small layers on CPU are multiplied by torch, not by oneDNN.

oneDNN builds a kernel per layer shape and number of tokens in about 0.2 ms, and in-flight batching meets more numbers
than it keeps. It also packs with every weight update. torch multiplies a layer of 64 × 192 in 0.02 ms. Large layers
gain by oneDNN.
"""

from typing import Any

import torch
from torch import nn

SMALL = 65_536
"""Elements of a weight up to which torch's own product is at least as fast as oneDNN's, at 1 … 256 tokens."""


def multiply_small_layers_plainly() -> None:
    """Wraps vLLM's choice of a CPU layer's product. A layer that stays plain keeps its weight as a parameter."""
    from vllm.model_executor.layers import utils

    choose = utils.dispatch_cpu_unquantized_gemm
    if choose.__module__ == __name__:
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if is_small(layer.weight):
            layer.cpu_linear = nn.functional.linear
        else:
            choose(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def is_small(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.dtype == torch.float32 and weight.numel() <= SMALL
