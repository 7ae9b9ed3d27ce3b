"""The policy as others load it: Hugging Face parameter names, the run's dtype, LoRA merged, no tied duplicates.

An exported model is the folder `exports/step_<n>/`, published by one rename; every rank writes some of its files.

The value head stays with the trainer: it is in no update and in no exported model, only in a file of its own.
"""

import copy
import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from pipelinerl.disk import sync_path
from pipelinerl.errors import CheckpointError
from pipelinerl.finetune.checkpoints import begin, publish, unpublished_name
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.peers import Peers
from pipelinerl.weights.protocol import ParamSpec

LM_PREFIX = "lm."
VALUE_PREFIX = "value_head."
BASE, LORA_A, LORA_B = ".base_layer.", ".lora_A.", ".lora_B."

T = TypeVar("T")

FILE_BYTES = 2 * 2**30
"""A file of an exported model is put together by one rank."""


def export_root(run_dir: Path) -> Path:
    return run_dir / "exports"


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


@dataclass(frozen=True, kw_only=True)
class StagedExport:
    """This rank's share of an exported model, in host memory."""

    files: dict[int, dict[str, Tensor]]
    """Number of the file → its tensors."""
    num_files: int
    value_head: dict[str, Tensor]
    """Empty without one, and on ranks above 0."""
    dtype: torch.dtype


def stage_export(engine: Engine, dtype: torch.dtype) -> StagedExport:
    """Copy the exported parameters to host memory, every rank those of its files. Collective."""
    specs = exported_specs(engine, dtype)
    numbers = file_numbers([(spec.name, math.prod(spec.shape) * dtype.itemsize) for spec in specs], FILE_BYTES)
    files: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in exported_parameters(engine, dtype):
        if numbers[name] % engine.world_size == engine.rank:
            files[numbers[name]][name] = tensor.to("cpu", copy=True)
    num_files = max(numbers.values()) + 1
    return StagedExport(files=dict(files), num_files=num_files, value_head=_stage_value_head(engine), dtype=dtype)


def file_numbers(sizes: Iterable[tuple[str, int]], file_bytes: int) -> dict[str, int]:
    """Number of the file of each (name, bytes): a file is closed when it has ``file_bytes``."""
    numbers, number, size = {}, 0, 0
    for name, num_bytes in sizes:
        if size >= file_bytes:
            number, size = number + 1, 0
        numbers[name] = number
        size += num_bytes
    return numbers


def write_export(
    peers: Peers, root: Path, step: int, staged: StagedExport, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Write and publish `step_<n>/`: a Hugging Face model with its tokenizer, and the value head. Collective.

    Raises:
        CheckpointError: on all ranks; earlier exports are as before.
    """
    folder, target = root / unpublished_name(step), root / f"step_{step}"
    try:
        begin(peers, root, step)
        placed = peers.together(lambda: _write_weights(folder, staged, lm))

        def finish() -> None:
            if staged.num_files > 1:
                _write_index(folder, [entry for entries in placed for entry in entries])
            _write_surroundings(folder, staged, lm, tokenizer)
            for path in folder.iterdir():
                sync_path(path)
            publish(folder, target)

        peers.together(finish if peers.rank == 0 else lambda: None)
    except CheckpointError as error:
        if peers.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"the model of step {step} cannot be exported to {root}: {error}") from error
    return target


def _write_weights(folder: Path, staged: StagedExport, lm: PreTrainedModel) -> list[tuple[str, str, int]]:
    """This rank's files, synced: (tensor, file, bytes) of what is in them, under the names of the model's own files."""
    placed = []
    for number, tensors in sorted(staged.files.items()):
        file = f"model-{number + 1:05d}-of-{staged.num_files:05d}.safetensors"
        path = folder / (file if staged.num_files > 1 else "model.safetensors")
        named = revert_weight_conversion(lm, tensors)
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, path, metadata={"format": "pt"})
        sync_path(path)
        placed += [(name, path.name, tensor.nbytes) for name, tensor in named.items()]
    return placed


def _write_index(folder: Path, placed: Iterable[tuple[str, str, int]]) -> None:
    placed = sorted(placed)
    index = {
        "metadata": {"total_size": sum(size for _, _, size in placed)},
        "weight_map": {name: file for name, file, _ in placed},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_surroundings(
    folder: Path, staged: StagedExport, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Everything of the model but its weights."""
    config = copy.deepcopy(lm.config)
    config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    if lm.is_remote_code():
        custom_object_save(lm, folder, config=config)
    config.save_pretrained(folder)
    _name_dtype(folder / "config.json", staged.dtype)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if staged.value_head:
        save_file(staged.value_head, folder / "value_head.safetensors")


def _name_dtype(path: Path, dtype: torch.dtype) -> None:
    """Name the dtype of the exported weights in the model's config.json."""
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _stage_value_head(engine: Engine) -> dict[str, Tensor]:
    """The value head on rank 0, if there is one. Collective."""
    head: dict[str, Tensor] = {}
    if engine.policy.value_head is not None:
        for name, tensor in engine.named_full_parameters():
            if name.startswith(VALUE_PREFIX) and engine.rank == 0:
                head[name.removeprefix(VALUE_PREFIX)] = tensor.to("cpu", copy=True)
    return head
