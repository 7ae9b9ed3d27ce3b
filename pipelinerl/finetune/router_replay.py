"""Router replay: the trainer sends each token to the experts that the server chose for it (arXiv:2510.11370).

Inside a model's mixtures of experts ``torch.topk`` over the experts returns the recorded choice with the trainer's own
scores, so that the gradient of the router is that of the chosen experts (docs/algorithms.md §7).

Shapes: N tokens of the layout's grid, k experts per token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipelinerl.errors import ConfigError

EXPERTS = "experts"
"""Name of the child module with the experts in transformers' mixtures of experts."""


class RouterReplay:
    """The routers of one model. ``announce`` sets the choice of the next forward pass and its backward pass."""

    def __init__(self, layers: nn.ModuleList):
        """Wrap the mixtures of experts in the decoder ``layers``. Raises ``ConfigError`` if there are none."""
        self._chosen: Tensor | None = None
        self._num_layers = len(layers)
        self._was_replayed = False
        blocks = [
            (i, b) for i, layer in enumerate(layers) for b in layer.modules() if EXPERTS in dict(b.named_children())
        ]
        for number, (index, block) in enumerate(blocks, 1):
            place = _Place(index, num_experts(block.get_submodule(EXPERTS)), number == len(blocks))
            block.forward = partial(self._replayed, block.forward, place)
        if not blocks:
            raise ConfigError("finetune.router_replay is true, but the model has no experts: set it to false")

    def announce(self, chosen: Tensor | None) -> None:
        """Set int16 [N, layers · k], the experts of each token in each layer. −1 = not recorded. None: no replay."""
        self._chosen = None if chosen is None else chosen.unflatten(1, (self._num_layers, -1))

    def _replayed(self, forward: Callable[..., Any], place: "_Place", *args: Any, **kwargs: Any) -> Any:
        """``forward`` with the recorded choice. Raises ``ConfigError`` if no layer of the model takes it."""
        if self._chosen is None:
            return forward(*args, **kwargs)
        with _ReplayedChoice(self._chosen[:, place.layer].long(), place.experts) as choice:
            found = forward(*args, **kwargs)
        self._was_replayed |= choice.was_replayed
        if place.is_last and not self._was_replayed:
            raise ConfigError(
                "finetune.router_replay is true, but this model does not choose its experts by topk: set it to false"
            )
        return found


class _Place(NamedTuple):
    """A mixture of experts in the model."""

    layer: int
    experts: int
    is_last: bool


def num_experts(experts: nn.Module) -> int:
    """Number of experts in a module that holds them as one tensor or as a list of modules."""
    return len(experts) if isinstance(experts, nn.ModuleList) else next(experts.parameters()).shape[0]


class _ReplayedChoice(TorchFunctionMode):
    """Replaces the choice of ``torch.topk`` among all experts. Groups of experts are chosen as ever."""

    def __init__(self, chosen_Nk: Tensor, experts: int):
        super().__init__()
        self._chosen_Nk, self._experts = chosen_Nk, experts
        self.was_replayed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape != (len(self._chosen_Nk), self._experts):
            return found
        self.was_replayed = True
        indices_Nk = torch.where(self._chosen_Nk < 0, found[1], self._chosen_Nk)
        return torch.return_types.topk((args[0].gather(-1, indices_Nk), indices_Nk))
