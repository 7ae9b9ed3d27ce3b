"""Learns which elements of a model's parameters come from which bytes of a version, from the model's own loaders.

The loaders run once on tensors without memory, and every copy is recorded. A tensor that a loader computes with is kept
whole.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout, torch_dtype
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.weights.staging_memory import WHOLE_BYTES
from pipelinerl.weights.transfer.shard import Copy, LoadPlan, View

log = logging.getLogger(__name__)

CPU, META = torch.device("cpu"), torch.device("meta")
_NO_VALUES = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)
"""What loaders do to padding."""


class _Recorder(TorchDispatchMode):
    """Records every assignment to an existing tensor, and which sent tensors (``sent``, by storage) go elsewhere."""

    def __init__(self, sent: Mapping[int, str]) -> None:
        super().__init__()
        self._sent = sent
        self.assignments: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """(target, source). None = the target is changed in another way than by a copy."""
        self.computed: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            self.assignments.append((target, source))
            if source.is_meta and not target.is_meta:  # some models make parameters on a device of their own choice
                func(target.to(META), source)
                return target
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
            self.computed |= {self._sent[storage] for storage in given & self._sent.keys()}
            if func._schema.is_mutable and func not in _NO_VALUES and isinstance(args[0], torch.Tensor):  # noqa: SLF001 — the schema has no public name
                self.assignments.append((args[0], None))
        return result


class _RealIntegers(TorchFunctionMode):
    """Gives memory to integers and booleans made within ``torch.device("meta")``: loaders look at their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors) and not all(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map(_without_memory, (args, kwargs))
        made = func(*args, **kwargs)
        is_new = not tensors and isinstance(made, torch.Tensor) and kwargs.get("device") is None
        if is_new and made.is_meta and not made.is_floating_point() and not made.is_complex():
            return func(*args, **kwargs, device=CPU)
        return made


@contextmanager
def without_memory() -> Iterator[None]:
    """Has modules made without memory, except for integers and booleans."""
    with META, _RealIntegers():
        yield


def learn(
    model: nn.Module,
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    specs: Sequence[ParamSpec],
    device: torch.device = META,
) -> LoadPlan:
    """Returns the load plan of a model.

    Args:
        load: the model's own function for loading named tensors. May return the names of what it has loaded.
        specs: parameters as they are sent.
        device: of the model. On `meta` it has no memory.
    Raises:
        WeightUpdateError: by the loader's own account a parameter is missing.
    """
    sources = [(spec.name, torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)) for spec in specs]
    sent = {_storage(tensor): name for name, tensor in sources}
    parameters = {_storage(tensor): name for name, tensor in model.named_parameters()}
    live = {_storage(tensor): name for name, tensor in model.named_buffers()} | parameters
    with _Recorder(sent) as recorder:
        loaded = load(iter(sources))
    if isinstance(loaded, set) and (missing := {*parameters.values()} - loaded):
        raise WeightUpdateError(f"the update lacks {len(missing)} parameters, e.g. {sorted(missing)[:3]}")
    copies, computed, used = [], set(), recorder.computed
    for target, source in recorder.assignments:
        name, origin = live.get(_storage(target)), source is not None and sent.get(_storage(source))
        if name is None:
            used |= {origin} if origin else set()
            continue
        if origin:
            assert source is not None
            copies.append(Copy(name, View.of(target), origin, View.of(source)))
        else:
            computed.add(name)
    copied = {copy.target for copy in copies} - computed
    used |= {copy.source for copy in copies if copy.target in computed}
    unlearned = ({*parameters.values()} | computed) - copied
    if unlearned - computed:  # they may be replaced as a whole, by any tensor that is not copied
        used |= {*sent.values()} - {copy.source for copy in copies}
    learned = tuple(copy for copy in copies if copy.target in copied)
    return LoadPlan(learned, tuple(sorted(unlearned)), frozenset(used if unlearned else ()))


def learned(bare: Any, with_memory: Callable[[], Any], layout: Layout) -> LoadPlan:
    """Returns the load plan of a server's model. Loaders that look at values run on zeros in host memory.

    Args:
        bare: the model without memory.
        with_memory: makes the same model on the CPU.
    Raises:
        WeightUpdateError: the loaders refuse these tensors, or a version is too large to learn them in this way.
    """
    try:
        return learn(bare, bare.load_weights, layout.specs)
    except WeightUpdateError:
        raise
    except Exception as error:  # noqa: BLE001 — whatever a model's loaders raise without memory
        reason = f"{type(error).__name__}: {error}"
    refuse_large(layout, f"its loaders do not run without memory ({reason})")
    log.warning("event=loaders_look_at_values reason=%s", reason)
    try:
        model = with_memory()
        return learn(model, model.load_weights, layout.specs, CPU)
    except Exception as error:  # whatever a model's loaders raise
        raise WeightUpdateError(f"the model refuses the weights: {type(error).__name__}: {error}") from error


def refuse_large(layout: Layout, reason: str) -> None:
    """Raises ``WeightUpdateError`` if a version is too large to be held whole by every worker."""
    if layout.num_bytes > WHOLE_BYTES:
        raise WeightUpdateError(
            f"each worker would hold all {layout.num_bytes / 2**30:.0f} GiB of a version, more than "
            f"{WHOLE_BYTES >> 30} GiB, because {reason}: serve the model without quantization and with "
            "vllm_config.vllm_kwargs.moe-backend=triton"
        )


def _without_memory(value: Any) -> Any:
    return value.to(META) if isinstance(value, torch.Tensor) else value


def _storage(tensor: torch.Tensor) -> int:
    """Returns the identity of the storage, also for tensors without memory."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001 — the identity of a storage without memory
