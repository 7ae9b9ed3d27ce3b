"""The policy as others load it: Hugging Face parameter names, the run's dtype, no tied duplicates, no value head."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipelinerl.finetune.checkpoints import set_exported_dtype
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.publish import Snapshot

LM_PREFIX = "lm."


def exported_parameters(engine: Engine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor in ``dtype``) of what a server loads. Collective; rank 0 gets the tensors."""
    for name, tensor in engine.named_full_parameters():
        if name.startswith(LM_PREFIX):
            yield name.removeprefix(LM_PREFIX), tensor.to(dtype)


def snapshot(engine: Engine, dtype: torch.dtype) -> Snapshot:
    """A copy of the exported parameters that training cannot change. Collective; empty above rank 0."""
    taken = {name: tensor.clone() for name, tensor in exported_parameters(engine, dtype)}
    return taken if engine.rank == 0 else {}


def save_hf(
    engine: Engine, folder: Path, dtype_name: str, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the policy as a Hugging Face model. Collective; rank 0 writes."""
    parameters = {name: tensor.to("cpu", copy=True) for name, tensor in exported_parameters(engine, dtype)}
    if engine.rank != 0:
        return
    engine.policy.lm.save_pretrained(folder, state_dict=parameters)
    set_exported_dtype(folder, dtype_name)
    tokenizer.save_pretrained(folder)
