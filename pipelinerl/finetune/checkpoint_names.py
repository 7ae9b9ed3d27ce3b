"""The names and shapes that a model's parameters have in its checkpoint, which are those that servers load.

Each tensor of a checkpoint is a block of one parameter here, e.g. one of the experts that transformers keeps as one
tensor. ``CheckpointNames`` finds the blocks by the conversion of transformers, on tensors without memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl.errors import ConfigError
from pipelinerl.weights.transfer.shard import View


@dataclass(frozen=True)
class Block:
    """A tensor of the checkpoint, and its elements in a parameter."""

    name: str
    view: View

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.size

    @property
    def numel(self) -> int:
        return torch.Size(self.view.size).numel()

    @property
    def is_range(self) -> bool:
        """Whether its elements are consecutive in the flattened parameter and in the same order."""
        return torch.empty_strided(self.view.size, self.view.stride, device="meta").is_contiguous()


class CheckpointNames:
    """The blocks of one model's parameters and saved buffers."""

    def __init__(self, lm: PreTrainedModel):
        self._lm = lm
        self._saved = lm.state_dict(keep_vars=True).keys() & dict(lm.named_buffers()).keys()
        self._blocks: dict[str, tuple[Block, ...]] = {}

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
        """The blocks of one parameter, in the order of their names in the checkpoint.

        Args:
            name: of the parameter in ``lm``, without adapters.
            shape: of the whole parameter.
        Raises:
            ConfigError: a tensor of the checkpoint is not a block of this parameter alone.
        """
        if name not in self._blocks:
            self._blocks[name] = self._find(name, shape)
        return self._blocks[name]

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, buffer) of each buffer that belongs to the checkpoint, e.g. the bias of the choice of experts."""
        named = self._lm.named_buffers() if self._saved else ()  # a walk over all modules, in every update
        return ((name, buffer) for name, buffer in named if name in self._saved)

    def split(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, view of ``whole``) of each block of a parameter or buffer."""
        whole = whole.contiguous()
        for block in self.blocks(name, tuple(whole.shape)):
            yield block.name, block.view.read(whole)

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
        whole = torch.empty(shape, device="meta")
        try:
            with _NoCopies():
                found = revert_weight_conversion(self._lm, {name: whole})
        except Exception as error:  # a conversion of transformers may raise anything
            raise self._refusal(name) from error
        blocks = tuple(Block(key, View.of(tensor)) for key, tensor in found.items())
        storages = {tensor.untyped_storage()._cdata for tensor in found.values()}  # noqa: SLF001 — storages on meta have no address
        if storages != {whole.untyped_storage()._cdata} or sum(block.numel for block in blocks) != whole.numel():  # noqa: SLF001 — storages on meta have no address
            raise self._refusal(name)
        return blocks

    def _refusal(self, name: str) -> ConfigError:
        return ConfigError(
            f"model_path: {type(self._lm).__name__}'s parameter {name} has another form in the checkpoint, which is "
            "not a division of the parameter into blocks, so servers cannot be sent it; use another model"
        )


class _NoCopies(TorchDispatchMode):
    """Makes ``contiguous`` return the tensor itself, so that the result stays a view of its source."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))
