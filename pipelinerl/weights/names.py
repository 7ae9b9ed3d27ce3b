"""From the trained module's parameters to the names of its Hugging Face checkpoint, which is what servers load.

Wrappers' prefixes go, a tied head is sent once (under the name that the checkpoint keeps), a value head never leaves
the trainer. LoRA weights must be merged before they come here.
"""

from collections.abc import Iterable, Sequence

import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.protocol import ParamSpec

WRAPPER_PARTS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path components that wrappers add anywhere in a name."""
VALUE_HEAD_PARTS = frozenset({"value_head", "v_head"})
LORA_PARTS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"})


def checkpoint_name(name: str) -> str | None:
    """The checkpoint's name of a parameter; None = it stays with the trainer.

    Raises:
        WeightUpdateError: an unmerged LoRA parameter.
    """
    parts = [part for part in name.split(".") if part not in WRAPPER_PARTS]
    if VALUE_HEAD_PARTS & set(parts):
        return None
    if LORA_PARTS & set(parts):
        raise WeightUpdateError(f"{name} is an unmerged LoRA parameter: servers take merged weights")
    return ".".join(parts)


def tied_names(model: torch.nn.Module) -> frozenset[str]:
    """Names under which a parameter appears a second time; the first in registration order is the one to send."""
    first: dict[int, str] = {}
    tied = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            tied.add(name)
    return frozenset(tied)


def export_plan(
    named: Iterable[tuple[str, torch.Tensor]], *, tied: frozenset[str] = frozenset(), dtype: torch.dtype | None = None
) -> tuple[tuple[str, ParamSpec], ...]:
    """What to send: (the trainer's name, the parameter as it travels), without touching any value.

    Args:
        named: the trainer's named parameters; only name, shape and dtype are read.
        tied: names to leave out because another name carries the same parameter.
        dtype: floating dtype on the wire; None = the parameter's own.
    """
    plan = []
    for name, tensor in named:
        target = None if name in tied else checkpoint_name(name)
        if target is None:
            continue
        spec = spec_of(target, tensor)
        if dtype is not None and tensor.is_floating_point():
            spec = ParamSpec(target, str(dtype).removeprefix("torch."), spec.shape)
        plan.append((name, spec))
    return tuple(plan)


def specs_of(plan: Sequence[tuple[str, ParamSpec]]) -> tuple[ParamSpec, ...]:
    return tuple(spec for _, spec in plan)
