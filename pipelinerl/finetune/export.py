"""Exports the policy as a Hugging Face model: the checkpoint's names, the run's dtype, LoRA merged, no tied duplicates.

Every rank writes some files of the folder `exports/step_<n>/`, then one rename publishes it. With LoRA its folder
`adapter/` is an adapter that PEFT loads onto the base. The value head is in a separate file, and servers never get it.
"""

import copy
import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file

from pipelinerl.config.paths import EXPORTS
from pipelinerl.errors import CheckpointError, ConfigError
from pipelinerl.finetune.adapter import ADAPTER_FOLDER, BASE, LORA_A, LORA_B, stage_adapter, write_adapter
from pipelinerl.finetune.checkpoints import begin, publish, unpublished_name
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.longrope import restore_longrope
from pipelinerl.finetune.model import LM_PREFIX, Policy
from pipelinerl.finetune.rendezvous import Peers
from pipelinerl.weights.layout import spec_bytes
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.world.disk import sync_path

log = logging.getLogger(__name__)

VALUE_PREFIX = "value_head."
VALUE_FILE, OLD_VALUE_FILE = "value_head.safetensors", "value_head.pt"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

T = TypeVar("T")

FILE_BYTES = 2 * 2**30
"""Size at which a file of an exported model is closed. One rank assembles each file."""


def export_root(run_dir: Path) -> Path:
    return run_dir / EXPORTS


def exported_parts(named: Iterable[tuple[str, T]], keep: Callable[[T], T]) -> Iterator[tuple[str, tuple[T, ...]]]:
    """(exported name, parts) of the language model's parameters: one part, or base, A and B of an adapted weight.

    Args:
        named: (name in the policy, value), in the policy's order. The value head is left out.
        keep: copies a part that must outlive the next item of ``named``: an adapted weight is yielded with its last
            part.
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
    """(name in the checkpoint, full tensor in ``dtype``) of each parameter that a server loads. Collective.

    Saved buffers follow in their own dtype. They are constants of the model, e.g. the bias of an expert's choice.
    """
    names, scaling = engine.policy.names, engine.policy.lora_scaling
    is_adapted = any(LORA_A in name for name, _ in engine.full_shapes())  # adapters are merged as they are trained
    full = engine.named_full_parameters(None if is_adapted else dtype)
    for name, parts in exported_parts(full, torch.clone):
        if len(parts) == 1:
            merged = parts[0].to(dtype)
        else:
            base, a, b = (part.float() for part in parts)
            merged = torch.addmm(base, b, a, alpha=scaling).to(dtype)
        yield from names.split(name, merged)
    for name, buffer in names.buffers():
        yield from names.split(name, buffer)


def exported_specs(engine: Engine, dtype: torch.dtype) -> list[ParamSpec]:
    """Name, dtype and full shape of each exported parameter, in the order of ``exported_parameters``."""
    parts = exported_parts(engine.full_shapes(), lambda shape: shape)
    wholes = [(name, dtype, tuple(shapes[0])) for name, shapes in parts]
    wholes += [(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in engine.policy.names.buffers()]
    return [
        ParamSpec(block.name, str(kind).removeprefix("torch."), block.shape)
        for name, kind, shape in wholes
        for block in engine.policy.names.blocks(name, shape)
    ]


@dataclass(frozen=True, kw_only=True)
class StagedExport:
    """This rank's share of an exported model, in host memory."""

    files: dict[int, dict[str, Tensor]]
    """The tensors by name, by number of their file."""
    num_files: int
    value_head: dict[str, Tensor]
    """Empty if there is none, and on ranks above 0."""
    dtype: torch.dtype
    adapter: dict[str, Tensor]
    """In float32. Empty without LoRA, and on ranks above 0."""
    lora_scaling: float


def stage_export(engine: Engine, dtype: torch.dtype) -> StagedExport:
    """Copy to host memory, in ``dtype``, the exported parameters of the files that this rank writes. Collective."""
    specs = exported_specs(engine, dtype)
    numbers = file_numbers([(spec.name, spec_bytes(spec)) for spec in specs], FILE_BYTES)
    files: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in exported_parameters(engine, dtype):
        if numbers[name] % engine.world_size == engine.rank:
            files[numbers[name]][name] = tensor.to("cpu", copy=True)
    num_files = max(numbers.values()) + 1
    return StagedExport(
        files=dict(files),
        num_files=num_files,
        value_head=_stage_value_head(engine),
        dtype=dtype,
        adapter=stage_adapter(engine),
        lora_scaling=engine.policy.lora_scaling,
    )


def file_numbers(sizes: Iterable[tuple[str, int]], file_bytes: int) -> dict[str, int]:
    """Number of the file for each (name, bytes), from 0. A file is closed when it has at least ``file_bytes``."""
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

    Args:
        root: folder of the exports.
        staged: this rank's share of the model.
        lm: the model, for its configuration.

    Raises:
        CheckpointError: on all ranks. Earlier exports are intact.
    """
    folder, target = root / unpublished_name(step), root / f"step_{step}"
    try:
        begin(peers, root, step)
        placed = peers.together(lambda: _write_weights(folder, staged))

        def finish() -> None:
            if staged.num_files > 1:
                _write_index(folder, [entry for entries in placed for entry in entries])
            _write_surroundings(folder, staged, lm, tokenizer)
            for path in folder.rglob("*"):
                sync_path(path)
            publish(folder, target)

        peers.together(finish if peers.rank == 0 else lambda: None)
    except CheckpointError as error:
        if peers.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"the model of step {step} cannot be exported to {root}: {error}") from error
    return target


def _write_weights(folder: Path, staged: StagedExport) -> list[tuple[str, str, int]]:
    """Write and sync this rank's files. Returns (tensor, file, bytes)."""
    placed = []
    for number, tensors in sorted(staged.files.items()):
        file = f"model-{number + 1:05d}-of-{staged.num_files:05d}.safetensors"
        path = folder / (file if staged.num_files > 1 else "model.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        sync_path(path)
        placed += [(name, path.name, tensor.nbytes) for name, tensor in tensors.items()]
    return placed


def _write_index(folder: Path, placed: Iterable[tuple[str, str, int]]) -> None:
    placed = sorted(placed)
    index = {
        "metadata": {"total_size": sum(size for _, _, size in placed)},
        "weight_map": {name: file for name, file, _ in placed},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_surroundings(
    folder: Path, staged: StagedExport, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write everything but the model's weights: configuration, code, tokenizer, value head and adapter."""
    config = copy.deepcopy(lm.config)
    restore_longrope(config)
    config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    if lm.is_remote_code():
        custom_object_save(lm, folder, config=config)
    config.save_pretrained(folder)
    _name_dtype(folder / "config.json", staged.dtype)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if hasattr(lm, "get_image_features"):
        _copy_processor(folder, tokenizer.name_or_path)
    if staged.value_head:
        save_file(staged.value_head, folder / VALUE_FILE)
    if staged.adapter:
        write_adapter(folder / ADAPTER_FOLDER, staged.adapter, lm, staged.lora_scaling)


def _copy_processor(folder: Path, source: str) -> None:
    """Copy the files that describe how images are processed. They do not change with the weights."""
    for name in PROCESSOR_FILES:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copyfile(found, folder / name)


def _name_dtype(path: Path, dtype: torch.dtype) -> None:
    """Set the dtype of the exported weights in the model's config.json."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_value_head(policy: Policy, folder: Path) -> None:
    """Begin with the value head beside an exported model, ours or PipelineRL's `value_head.pt`. Else it stays zero.

    Raises:
        ConfigError: the file does not hold a head of this model.
    """
    head = policy.value_head
    found = next((path for path in (folder / VALUE_FILE, folder / OLD_VALUE_FILE) if path.is_file()), None)
    if head is None or found is None:
        return
    try:
        saved = load_file(found) if found.name == VALUE_FILE else torch.load(found, weights_only=True)
        head.load_state_dict({name.removeprefix("output."): tensor for name, tensor in saved.items()})
    except Exception as error:  # a damaged file may raise anything
        raise ConfigError(f"{found} is not a value head of this model: {' '.join(str(error).split())}") from error
    log.info("event=value_head_read file=%s", found)


def _stage_value_head(engine: Engine) -> dict[str, Tensor]:
    """Copy the value head, if there is one, to host memory on rank 0. Collective."""
    head: dict[str, Tensor] = {}
    if engine.policy.value_head is not None:
        for name, tensor in engine.named_full_parameters():
            if name.startswith(VALUE_PREFIX) and engine.rank == 0:
                head[name.removeprefix(VALUE_PREFIX)] = tensor.to("cpu", copy=True)
    return head
