"""Puts staged bytes into a live vLLM model: by copies to where vLLM's own loaders would put them (docs/weights.md).

Addresses stay, so captured CUDA graphs stay right. `reload_in_place` is vLLM's layerwise reload during the pause, for
models with a layer that changes its weights after loading in an unknown way.
"""

# A parameter is replaced without registering it again, for which torch.nn.Module has no public way.
# ruff: noqa: SLF001

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.load.learning import META, without_memory
from pipelinerl.weights.transfer.shard import StagedCopy

log = logging.getLogger(__name__)

PACKED_PRODUCT = "cpu_linear"
"""Attribute of vLLM's CPU layers that holds the multiplication with their weight, packed or not."""
PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
"""Kernels that read experts in the form in which they were loaded."""


@dataclass(frozen=True)
class Packed:
    """A weight that the live model keeps in another form than it was loaded in."""

    name: str
    is_used: Callable[[], bool]
    """Whether the live model still multiplies with what the newest swap gave it."""


class Swap:
    """Copies staged bytes into the parameters of a live model. ``bare`` is the same module tree without memory."""

    def __init__(self, live: nn.Module, bare: Any, model_config: ModelConfig, device: torch.device):
        self._live, self._bare, self._dtype, self._device = live, bare, model_config.dtype, device
        self._pairs = [*zip(live.modules(), bare.modules(), strict=True)]
        self._templates = {module: {**_parameters(module)} for _, module in self._pairs}
        self._names = {id(param): name for name, param in bare.named_parameters()}
        self._packing = [(ours, theirs) for ours, theirs in self._pairs if _is_packed(ours)]
        self._replaced = {self._name(module, key) for _, module in self._packing for key in self._templates[module]}
        self._attention: list[Any] = [module for module in live.modules() if is_deferred_attention_layer(module)]
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """Targets and sources of the copies in the pause."""
        self._known: tuple[Sequence[StagedCopy], int] | None = None
        """The copies, and the address of the staged bytes that they read."""
        self._computed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._packed: list[Packed] = []
        """Weights that the newest swap packed."""

    @classmethod
    def of(cls, live: nn.Module, bare: Any, model_config: ModelConfig, device: torch.device) -> "Swap":
        """Returns the swap of a live model.

        Raises:
            WeightUpdateError: a layer keeps its weights in an unknown way.
        """
        for module in live.modules():
            if not (_keeps(module) or _is_packed(module)):
                method = type(getattr(module, "quant_method", None)).__name__
                raise WeightUpdateError(f"{type(module).__name__} changes its weights after loading ({method})")
        swap, parameters = cls(live, bare, model_config, device), dict(live.named_parameters())
        for name, template in bare.named_parameters():
            if name not in swap._replaced and _form(parameters.get(name)) != _form(template):
                raise WeightUpdateError(f"{name} is not kept in the form in which it is loaded")
        return swap

    @property
    def packed(self) -> frozenset[str]:
        """Weights that the live model keeps packed."""
        return frozenset(weight.name for weight in self._packed)

    def unused(self) -> list[str]:
        """Returns the packed weights of the newest swap that the live model does not use."""
        return [weight.name for weight in self._packed if not weight.is_used()]

    def prepare(
        self,
        copies: Sequence[StagedCopy],
        staged: torch.Tensor,
        unlearned: Sequence[str] = (),
        wholes: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Makes everything that the swap copies or moves, without touching the live model.

        Args:
            staged: flat uint8, which ``copies`` read.
            unlearned: parameters that a loader computes.
            wholes: sent tensors that it computes with.
        Raises:
            WeightUpdateError: the model's loaders refuse them.
        """
        made = self._materialize(self._replaced.union(unlearned))
        if self._known != (copies, staged.data_ptr()):
            live = _tensors(self._live)
            pairs = (
                (one.target_view.read(live[one.target]), one.source(staged)) for one in copies if one.target not in made
            )
            self._groups, self._known = _grouped(pairs), (copies, staged.data_ptr())
        for one in copies:
            if one.target in made:
                one.target_view.read(made[one.target]).copy_(one.source(staged))
        if unlearned:
            try:
                self._bare.load_weights(iter((wholes or {}).items()))
            except Exception as error:  # whatever a model's loaders raise
                raise WeightUpdateError(f"the model refuses the weights: {type(error).__name__}: {error}") from error
        values, live = _tensors(self._bare), _tensors(self._live)
        self._computed = [(live[name], values[name]) for name in unlearned if name not in self._replaced]
        if nowhere := [name for name in unlearned if values[name].is_meta]:
            raise WeightUpdateError(f"a loader computes {nowhere[0]}, which is no parameter")
        for _, module in self._packing:
            method: Any = module.quant_method
            if _is_packed_experts(module):
                method.moe_kernel = None  # else vLLM takes them for packed already
            method.process_weights_after_loading(module)

    def swap(self) -> None:
        """Copies the staged bytes into the live model, and moves what was packed."""
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for target, source in self._computed:
            target.copy_(source)
        self._packed = []
        for live, bare in self._packing:
            self._move(live, bare)
        for module in self._attention:  # it may keep products of weights, e.g. those of latent attention
            module.process_weights_after_loading(self._dtype)
        self._computed = []
        self._release()

    def forget(self) -> None:
        """Lets go of the staged bytes."""
        self._known, self._groups = None, []

    def _move(self, live: nn.Module, bare: nn.Module) -> None:
        for name, param in _parameters(bare).items():
            target = live._parameters[name]
            assert target is not None, f"{name} is new"
            target.data = param.data
        if PACKED_PRODUCT in bare.__dict__:
            product = live.__dict__[PACKED_PRODUCT] = bare.__dict__.pop(PACKED_PRODUCT)
            self._packed.append(Packed(self._name(bare, "weight"), partial(_multiplies_with, live, product)))
        if _is_packed_experts(bare):
            self._packed += [
                Packed(self._name(bare, name), partial(_holds, live, name, param.data_ptr()))
                for name, param in _parameters(bare).items()
            ]

    def _name(self, bare: nn.Module, key: str) -> str:
        return self._names[id(self._templates[bare][key])]

    def _materialize(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Gives memory to these parameters of the bare model."""
        made: dict[str, torch.Tensor] = {}
        wanted = frozenset(names)
        for module, params in self._templates.items():
            for key, template in params.items():
                if (name := self._names[id(template)]) in wanted:
                    if name not in made:
                        with self._device:
                            made[name] = materialize_meta_tensor(template).zero_()
                    module._parameters[key] = made[name]
        return made

    def _release(self) -> None:
        for module, params in self._templates.items():
            module._parameters.update(params)


class Census:
    """Addresses of a model's parameters and buffers, which captured CUDA graphs read."""

    def __init__(self, model: nn.Module):
        self._places = [
            (f"{prefix}.{key}" if prefix else key, tensors, key)
            for prefix, module in model.named_modules()
            for tensors in (module._parameters, module._buffers)
            for key, tensor in tensors.items()
            if tensor is not None
        ]

    def take(self) -> list[int]:
        """Returns the address of each tensor, 0 where it is gone."""
        found = (tensors.get(key) for _, tensors, key in self._places)
        return [0 if tensor is None else tensor.data_ptr() for tensor in found]

    def check(self, before: Sequence[int], *, captures_graphs: bool) -> None:
        """Says which tensors have changed their address since they were ``before``.

        Raises:
            WeightUpdateError: captured graphs would read the old ones.
        """
        pairs = zip(self._places, before, self.take(), strict=True)
        moved = [name for (name, _, _), old, new in pairs if old != new]
        if moved:
            level = logging.ERROR if captures_graphs else logging.DEBUG
            log.log(level, "event=weights_moved tensors=%d first=%s graphs=%s", len(moved), moved[0], captures_graphs)
        if moved and captures_graphs:
            raise WeightUpdateError(
                f"the swap moved {len(moved)} tensors, e.g. {moved[:3]}, which captured CUDA graphs read at their old "
                "addresses: set vllm_config.vllm_kwargs.enforce-eager=true"
            )


def captures_graphs(vllm_config: VllmConfig) -> bool:
    """Whether the engine replays CUDA graphs, which read weights at the addresses of their capture."""
    return vllm_config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def bare_model(vllm_config: VllmConfig, device: torch.device = META) -> Any:
    """Returns the module tree of a server's model. On `meta` its weights have no memory."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with set_default_torch_dtype(vllm_config.model_config.dtype), without_memory() if device == META else device:
        return initialize_model(config)


def reload_in_place(model: Any, model_config: ModelConfig, params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Runs vLLM's layerwise reload, then packs a tied head's copy (CPU) again, which the reload omits."""
    initialize_layerwise_reload(model)
    model.load_weights(params)
    finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and PACKED_PRODUCT in module.__dict__:
            module.quant_method.process_weights_after_loading(module)


def comparable(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the live parameters that are stored in memory as they were loaded."""
    owners = {id(param): module for module in model.modules() for param in _parameters(module).values()}
    return {name: param.data for name, param in model.named_parameters() if param.numel() and _keeps(owners[id(param)])}


def _grouped(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Returns lists of targets and of their sources. torch copies a list in few kernels if all of it is alike."""
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        is_alike = target.is_contiguous() and source.is_contiguous()
        targets, sources = groups[target.device, source.device, target.dtype, source.dtype, is_alike]
        targets.append(target)
        sources.append(source)
    return [*groups.values()]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) | {name: param.data for name, param in model.named_parameters()}


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module._parameters.items() if param is not None}


def _form(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _keeps(module: nn.Module) -> bool:
    """Whether a layer keeps what is loaded into its parameters, beside a packed form at most."""
    method = getattr(module, "quant_method", None)
    if type(method) is UnquantizedFusedMoEMethod:
        return method.unquantized_backend in PLAIN_EXPERTS
    return method is None or is_deferred_attention_layer(module) or _is_plain_method(method)


def _is_plain_method(method: object) -> bool:
    return type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def _is_packed(module: nn.Module) -> bool:
    """Whether vLLM's CPU build multiplies with a packed form of the layer's weights."""
    if _is_packed_experts(module):
        return True
    is_plain = module.__dict__.get(PACKED_PRODUCT) is nn.functional.linear
    return current_platform.is_cpu() and _is_plain_method(getattr(module, "quant_method", None)) and not is_plain


def _is_packed_experts(module: nn.Module) -> bool:
    """Whether a layer holds experts that vLLM packs on CPU, in place of the parameters that they were loaded into."""
    method = getattr(module, "quant_method", None)
    return type(method) is UnquantizedFusedMoEMethod and method.unquantized_backend == UnquantizedMoeBackend.CPU


def _multiplies_with(layer: nn.Module, product: object) -> bool:
    return layer.__dict__.get(PACKED_PRODUCT) is product


def _holds(layer: nn.Module, name: str, address: int) -> bool:
    parameter = layer._parameters[name]
    return parameter is not None and parameter.data_ptr() == address
