"""`finetune.compile`: torch.compile of the decoder layers, with attention left as it is.

Layers of one shape share their compiled code, so the time that this takes does not grow with their number. The number
of tokens is a symbol in it, because every micro-batch has another. Packed attention reads the lengths of documents from
the host and has its own kernels. It stays outside and divides each layer's code into what comes before and after it.
"""

import torch
from torch import nn

from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.model import decoder_layers


def compile_layers(lm: nn.Module, backend: str = "inductor") -> None:
    """Let every decoder layer be compiled when it is first called.

    Args:
        lm: attends with ``attention.PACKED``.
        backend: of torch.compile.
    """
    register_attention(PACKED, torch.compiler.disable(packed_attention))
    for layer in decoder_layers(lm):
        layer.compile(backend=backend, dynamic=True)
