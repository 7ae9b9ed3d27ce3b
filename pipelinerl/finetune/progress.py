"""Reports the progress of a step from within it: every layer, forwards and backwards, and every chunk of the head.

A micro-batch of long answers may take longer than `launcher.hang_timeout_s`, and its layers do not. Compiled layers are
left alone, because a hook would break their code apart: their step reports the chunks of its head.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.model import Policy, decoder_layers
from pipelinerl.finetune.rl.head import OutputHead


def report_progress(policy: Policy, report: Callable[[], object], *, compiled: bool = False) -> None:
    """Call ``report`` for every part of a step that is computed, in forward and backward passes.

    ``compiled``: the layers are.
    """

    def computed(layer: nn.Module, arguments: Any, output: Any) -> None:
        report()
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, Tensor) and states.requires_grad:
            states.register_hook(lambda gradient: (report(), None)[1])

    head = policy.lm.get_output_embeddings()
    if isinstance(head, OutputHead):
        head.report_chunks(report)
    with contextlib.suppress(ConfigError):  # a model without a list of layers reports its head alone
        for layer in () if compiled else decoder_layers(policy.lm):
            layer.register_forward_hook(computed)
