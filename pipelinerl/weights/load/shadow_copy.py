"""Two ways to put staged checkpoint tensors into a live vLLM model.

`ShadowCopy` (CPU): a second copy of the module tree loads the weights through vLLM's ordinary load path while
the live model decodes. The swap then only moves references, so the pause does not grow with the model.
`reload_in_place` (GPU, and models whose layers process their weights in unknown ways): vLLM's layerwise reload
during the pause.
"""

# A parameter is replaced without registering it again, for which torch.nn.Module has no public way.
# ruff: noqa: SLF001

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.load.live_check import differing, learn
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.weights.transfer.shard import LoadPlan

PACKED_PRODUCT = "cpu_linear"
"""Attribute of vLLM's CPU layers that holds the multiplication with their packed weight."""


@dataclass(frozen=True)
class Packed:
    """A weight that the live model keeps in another form than it was loaded in."""

    name: str
    is_used: Callable[[], bool]
    """Whether the live model still multiplies with what the newest swap gave it."""


class ShadowCopy:
    """A copy of the live model's module tree that holds weights only between `load` and `swap`."""

    def __init__(self, live: nn.Module, shadow: Any, model_config: ModelConfig):
        self._live, self._shadow, self._model_config = live, shadow, model_config
        self._templates = {
            module: {name: param for name, param in module._parameters.items() if param is not None}
            for module in shadow.modules()
        }
        self._expected = {name for name, _ in shadow.named_parameters()}
        """Tied parameters appear once."""
        self._names = {id(param): name for name, param in shadow.named_parameters()}
        self._packed: list[Packed] = []
        """Of the newest swap."""

    @classmethod
    def of(cls, live: nn.Module, vllm_config: VllmConfig) -> "ShadowCopy | None":
        """Returns the shadow copy of a live model, without memory for its weights. None if some layer is not known."""
        if not all(_is_known(module) or _is_packed_experts(module) for module in live.modules()):
            return None
        return cls(live, bare_model(vllm_config), vllm_config.model_config)

    def learn(self, specs: Sequence[ParamSpec]) -> LoadPlan:
        """Returns the origin of the model's parameters."""
        return learn(self._shadow, self._shadow.load_weights, specs)

    def load(self, staged: Mapping[str, torch.Tensor], plan: LoadPlan) -> None:
        """Builds everything that the swap moves, without touching the live model.

        Parameters are compared before they are packed, because packed ones cannot be read. Multiplying with packed
        ones while the live model decodes is not allowed either, because vLLM's kernels share scratch memory.

        Raises:
            WeightUpdateError: a parameter is unknown, missing, of another shape, or differs from the sent one.
        """
        self._materialize()
        try:
            loaded = self._shadow.load_weights(staged.items())
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            raise WeightUpdateError(f"the model refuses the weights: {type(error).__name__}: {error}") from error
        missing = self._expected - loaded
        if missing:
            raise WeightUpdateError(f"the update lacks {len(missing)} parameters, e.g. {sorted(missing)[:3]}")
        wrong = next(differing(plan.copies, dict(self._shadow.named_parameters()), staged), None)
        if wrong is not None:
            raise WeightUpdateError(f"{wrong} is not what was sent after it was loaded")
        for module in self._shadow.modules():
            if _is_packed_experts(module):
                module.quant_method.moe_kernel = None  # else vLLM takes them for packed already
        process_weights_after_loading(self._shadow, self._model_config, torch.device("cpu"))

    @property
    def packed(self) -> frozenset[str]:
        """Weights that the live model keeps packed."""
        return frozenset(weight.name for weight in self._packed)

    def unused(self) -> list[str]:
        """Returns the packed weights of the newest swap that the live model does not use."""
        return [weight.name for weight in self._packed if not weight.is_used()]

    def swap(self) -> None:
        """Moves the shadow copy's tensors and packed weights to the live model."""
        self._packed = []
        for live, shadow in self._pairs():
            for name, param in shadow._parameters.items():
                if param is not None:
                    target = live._parameters[name]
                    assert target is not None, f"{name} is new"
                    target.data = param.data
            if PACKED_PRODUCT in shadow.__dict__:
                product = live.__dict__[PACKED_PRODUCT] = shadow.__dict__.pop(PACKED_PRODUCT)
                self._packed.append(Packed(self._name(shadow, "weight"), partial(_multiplies_with, live, product)))
            if _is_packed_experts(shadow):
                self._packed += [
                    Packed(self._name(shadow, name), partial(_holds, live, name, param.data_ptr()))
                    for name, param in shadow._parameters.items()
                    if param is not None
                ]
        self._release()

    def _name(self, shadow: nn.Module, key: str) -> str:
        return self._names[id(self._templates[shadow][key])]

    def _pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        return zip(self._live.modules(), self._shadow.modules(), strict=True)

    def _materialize(self) -> None:
        made: dict[int, torch.Tensor] = {}
        for module, params in self._templates.items():
            for name, template in params.items():
                if id(template) not in made:
                    made[id(template)] = materialize_meta_tensor(template)
                module._parameters[name] = made[id(template)]

    def _release(self) -> None:
        for module, params in self._templates.items():
            module._parameters.update(params)


def bare_model(vllm_config: VllmConfig) -> Any:
    """Returns the module tree of a server's model, without memory for its weights."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
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
    owners = {id(param): module for module in model.modules() for param in module._parameters.values()}
    return {
        name: param.data for name, param in model.named_parameters() if param.numel() and _is_known(owners[id(param)])
    }


def _is_known(module: nn.Module) -> bool:
    """Whether a layer keeps its weights only in parameters and `cpu_linear`."""
    method = getattr(module, "quant_method", None)
    return (
        method is None
        or is_deferred_attention_layer(module)
        or type(method)
        in (
            UnquantizedLinearMethod,
            UnquantizedEmbeddingMethod,
        )
    )


def _is_packed_experts(module: nn.Module) -> bool:
    """Whether a layer holds experts that vLLM packs on CPU, in place of the parameters that they were loaded into."""
    method = getattr(module, "quant_method", None)
    return type(method) is UnquantizedFusedMoEMethod and method.unquantized_backend == UnquantizedMoeBackend.CPU


def _multiplies_with(layer: nn.Module, product: object) -> bool:
    return layer.__dict__.get(PACKED_PRODUCT) is product


def _holds(layer: nn.Module, name: str, address: int) -> bool:
    parameter = layer._parameters[name]
    return parameter is not None and parameter.data_ptr() == address
