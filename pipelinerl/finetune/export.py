"""The policy as others load it: Hugging Face parameter names, the run's dtype, no tied duplicates, no value head."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipelinerl.finetune.checkpoints import set_exported_dtype
from pipelinerl.finetune.engines import Engine
from pipelinerl.weights.protocol import ParamSpec

LM_PREFIX = "lm."


def exported_parameters(engine: Engine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor in ``dtype``) of what a server loads. Collective; rank 0 gets the tensors."""
    for name, tensor in engine.named_full_parameters():
        if name.startswith(LM_PREFIX):
            yield name.removeprefix(LM_PREFIX), tensor.to(dtype)


def exported_specs(engine: Engine, dtype: torch.dtype) -> list[ParamSpec]:
    """Name, dtype and whole shape of each exported parameter, in the same order."""
    wire = str(dtype).removeprefix("torch.")
    return [
        ParamSpec(name.removeprefix(LM_PREFIX), wire, tuple(shape))
        for name, shape in engine.full_shapes()
        if name.startswith(LM_PREFIX)
    ]


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
