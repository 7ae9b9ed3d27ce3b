"""The one LoRA adapter of a policy server: the places of its tensors in vLLM's layers, as a module that a swap fills.

Every request runs with this adapter (`ADAPTER`), which is 0 until the first update. Where its tensors go is learned
from vLLM's own loading of adapters, on tensors without memory. The scaling α/r is in B when it comes.
"""

import copy
from collections.abc import Iterable

import torch
from torch import nn
from vllm.lora import model_manager
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import PPMissingLayer

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.load.adapter_request import ADAPTER

SLOT = 0
"""Its place in layers that have room for one adapter."""
STACKS = ("lora_a_stacked", "lora_b_stacked")
"""Attributes of vLLM's linear LoRA layers: A and B of each of their fused parts."""
ANY_RANK = PEFTHelper(r=1, lora_alpha=1, target_modules=[])
"""The scaling is 1."""


class AdapterSlots(nn.Module):
    """A worker's places of the adapter, as buffers under the names of their layers.

    Args:
        manager: vLLM's, of the model.
        device: None = the live places. Otherwise places of the same form on this device, into which ``load_weights``
            writes, and which have no memory on `meta`.
    """

    def __init__(self, manager: LoRAModelManager, device: torch.device | None = None):
        super().__init__()
        self.manager = manager
        self._layers = {
            name: layer if device is None else _copied(layer, device) for name, layer in manager.modules.items()
        }
        self._buffers.update(self._places())  # torch's own method takes no dots

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads an adapter as vLLM would.

        Args:
            weights: under PEFT's names, the scaling in B.
        Raises:
            WeightUpdateError: vLLM has no place for a tensor.
        """
        tensors = dict(weights)
        mapper = getattr(self.manager.model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            ADAPTER.lora_int_id,
            tensors,
            ANY_RANK,
            device=str(next(iter(tensors.values())).device),
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        self.manager._create_merged_loras_inplace(lora)  # noqa: SLF001 — how vLLM fuses q, k and v, has no public name
        if unknown := sorted(name for name in lora.loras if name not in self._layers and not self._is_elsewhere(name)):
            raise WeightUpdateError(
                f"vLLM serves no adapter of {unknown[0]} and {len(unknown) - 1} other modules of this model: set "
                "finetune.lora.send=merged, or name other modules in finetune.lora.target_modules"
            )
        for name, layer in self._layers.items():
            if (found := lora.get_lora(name)) is not None:
                layer.set_lora(SLOT, found.lora_a, found.lora_b)

    def unused(self) -> list[str]:
        """Returns the places that the live model does not multiply with."""
        if self.manager.lora_index_to_id[SLOT] != ADAPTER.lora_int_id:
            return [*self._buffers]
        used = self._places()
        return [name for name, place in self._buffers.items() if used.get(name) is not place]

    def _places(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{stack}.{number}": place
            for name, layer in self._layers.items()
            for stack in STACKS
            for number, place in enumerate(getattr(layer, stack))
        }

    def _is_elsewhere(self, name: str) -> bool:
        """Whether another pipeline-parallel worker has this module."""
        missing = (path for path, module in self.manager.model.named_modules() if isinstance(module, PPMissingLayer))
        return any(name.startswith(f"{path}.") for path in missing)


def _copied(layer: BaseLayerWithLoRA, device: torch.device) -> BaseLayerWithLoRA:
    """Returns the layer with places of its own, into which it copies an adapter without a reset: they begin at 0."""
    copied = copy.copy(layer)
    for stack in STACKS:
        setattr(copied, stack, tuple(torch.zeros_like(place, device=device) for place in getattr(layer, stack)))
    copied.reset_lora = lambda index: None
    return copied


def hold_adapter(manager: WorkerLoRAManager) -> None:
    """Registers the adapter, filled with 0, so that no request loads it from a file."""
    manager.add_dummy_lora(ADAPTER, manager.lora_config.max_lora_rank)
    manager.add_adapter(ADAPTER)


def _linear_modules(model: nn.Module) -> list[str]:
    """Names of the layers around which vLLM puts LoRA layers: the trainer adapts no embedding, head or experts."""
    return sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, LinearBase)})


model_manager.get_supported_lora_modules = _linear_modules
