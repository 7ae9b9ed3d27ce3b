"""The adapter of a LoRA run by itself: what servers are sent instead of all weights, and the folder that PEFT loads.

Names are those of PEFT's files, which vLLM reads too: `base_model.model.<module>.lora_A.weight` [r, in] and
`.lora_B.weight` [out, r].
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.model import LM_PREFIX
from pipelinerl.weights.protocol import ParamSpec

BASE, LORA_A, LORA_B = ".base_layer.", ".lora_A.", ".lora_B."
PEFT_PREFIX, PEFT_NAME = "base_model.model.", ".default."
"""PEFT's files have the prefix, and lack the name that an adapter has in a model."""
ADAPTER_FOLDER = "adapter"
"""In an exported model."""
ADAPTER_FILE = "adapter_model.safetensors"

T = TypeVar("T")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return LORA_A in name or LORA_B in name


def adapter_parameters(engine: Engine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(PEFT's name, full tensor in ``dtype``) of the adapter, with the scaling α/r in B. Collective.

    The scaling is applied in the precision in which B is trained.
    """
    scaling = engine.policy.lora_scaling
    for name, tensor in _named(engine.named_full_parameters(trained_only=True)):
        yield name, ((tensor.float() * scaling) if LORA_B in name else tensor).to(dtype)


def adapter_specs(engine: Engine, dtype: torch.dtype) -> list[ParamSpec]:
    """Name, dtype and full shape of each of ``adapter_parameters``, in their order."""
    kind = str(dtype).removeprefix("torch.")
    return [ParamSpec(name, kind, shape) for name, shape in _named(engine.full_shapes())]


def stage_adapter(engine: Engine) -> dict[str, Tensor]:
    """Copy the adapter, without the scaling, to rank 0's host memory. Empty on others and without LoRA. Collective."""
    if not any(is_adapter(name) for name, _ in engine.full_shapes()):
        return {}
    full = _named(engine.named_full_parameters(trained_only=True))
    return {name: tensor.float().to("cpu", copy=True) for name, tensor in full if engine.rank == 0}


def write_adapter(folder: Path, tensors: dict[str, Tensor], lm: PreTrainedModel, scaling: float) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads onto the base model.

    Args:
        tensors: what ``stage_adapter`` returned.
        lm: the model, which knows where its base came from.
        scaling: α/r.
    """
    from peft import LoraConfig

    folder.mkdir()
    rank = next(len(tensor) for name, tensor in tensors.items() if LORA_A in name)
    modules = {name.removeprefix(PEFT_PREFIX).partition(LORA_A)[0] for name in tensors if LORA_A in name}
    config = LoraConfig(
        r=rank,
        lora_alpha=round(scaling * rank),
        target_modules=sorted(modules),
        base_model_name_or_path=lm.name_or_path,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_FILE)


def _named(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """The adapter's items, with PEFT's names."""
    for name, value in named:
        if is_adapter(name):
            yield PEFT_PREFIX + name.removeprefix(LM_PREFIX).replace(PEFT_NAME, "."), value
