"""The policy as others load it: Hugging Face parameter names, the run's dtype, LoRA merged, no tied duplicates.

The value head stays with the trainer: it is in no update and in no exported model, only in a file of its own.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipelinerl.finetune.checkpoints import set_exported_dtype
from pipelinerl.finetune.engines import Engine
from pipelinerl.weights.protocol import ParamSpec

LM_PREFIX = "lm."
VALUE_PREFIX = "value_head."
BASE, LORA_A, LORA_B = ".base_layer.", ".lora_A.", ".lora_B."

T = TypeVar("T")


def exported_parts(named: Iterable[tuple[str, T]], keep: Callable[[T], T]) -> Iterator[tuple[str, tuple[T, ...]]]:
    """(exported name, parts) of the language model's parameters: one part, or base, A and B of an adapted weight.

    An adapted weight comes when its last part has come; ``keep`` makes a part outlive the next one.
    """
    held: dict[str, list[T]] = {}
    for full_name, value in named:
        if not full_name.startswith(LM_PREFIX):
            continue
        name = full_name.removeprefix(LM_PREFIX)
        if LORA_B in name:
            module = name.partition(LORA_B)[0]
            yield f"{module}.weight", (*held.pop(module), value)
        elif LORA_A in name:
            held[name.partition(LORA_A)[0]].append(keep(value))
        elif name.endswith(f"{BASE}weight"):
            held[name.partition(BASE)[0]] = [keep(value)]
        else:
            yield name.replace(BASE, "."), (value,)


def exported_parameters(engine: Engine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor in ``dtype``) of what a server loads. Collective; rank 0 gets the tensors."""
    scaling = engine.policy.lora_scaling
    for name, parts in exported_parts(engine.named_full_parameters(), torch.clone):
        if len(parts) == 1:
            yield name, parts[0].to(dtype)
        else:
            base, a, b = (part.float() for part in parts)
            yield name, torch.addmm(base, b, a, alpha=scaling).to(dtype)


def exported_specs(engine: Engine, dtype: torch.dtype) -> list[ParamSpec]:
    """Name, dtype and whole shape of each exported parameter, in the same order."""
    wire = str(dtype).removeprefix("torch.")
    parts = exported_parts(engine.full_shapes(), lambda shape: shape)
    return [ParamSpec(name, wire, tuple(shapes[0])) for name, shapes in parts]


def save_hf(engine: Engine, folder: Path, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the policy as a Hugging Face model. Collective; rank 0 writes."""
    parameters = {}
    for name, tensor in exported_parameters(engine, dtype):
        if engine.rank == 0:
            parameters[name] = tensor.to("cpu", copy=True)
    if engine.rank != 0:
        return
    engine.policy.lm.save_pretrained(folder, state_dict=parameters)
    set_exported_dtype(folder, str(dtype).removeprefix("torch."))
    tokenizer.save_pretrained(folder)


def save_value_head(engine: Engine, path: Path) -> None:
    """Write the value head, if there is one. Collective; rank 0 writes."""
    if engine.policy.value_head is None:
        return
    head = {}
    for name, tensor in engine.named_full_parameters():
        if name.startswith(VALUE_PREFIX) and engine.rank == 0:
            head[name.removeprefix(VALUE_PREFIX)] = tensor.to("cpu", copy=True)
    if engine.rank == 0:
        save_file(head, path)
