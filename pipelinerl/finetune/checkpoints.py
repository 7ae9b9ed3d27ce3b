"""Training states on disk: whole or not there.

A checkpoint is a folder `checkpoints/step_<n>/`, written under another name, synced, and published by one rename:

    manifest.json           what the folder holds: counters, stream positions, files with size and CRC
    state-00000.safetensors `<parameter>.param`, `.exp_avg`, `.exp_avg_sq`, whole tensors in float32
    rng-<rank>.safetensors  generators of that rank
    value_head.safetensors  with the value advantage: the value head alone (an export too)
    hf/                     the policy as a Hugging Face model with its tokenizer (an export: resuming does not read it)

Tensors are whole and named, so any engine on any number of ranks can resume. Nothing is pickled.
"""

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipelinerl.errors import CheckpointError

log = logging.getLogger(__name__)

FORMAT = 1
SHARD_BYTES = 2 * 2**30
MANIFEST = "manifest.json"


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Where training stands."""

    step: int = 0
    """Optimizer steps done = version of the weights."""
    samples_processed: int = 0
    tokens_processed: int = 0
    positions: dict[str, int] = {}
    """Next offset to read of each `training_data` stream, by `<instance>/<partition>`."""

    def after(self, num_samples: int, num_tokens: int, positions: dict[str, int]) -> "Counters":
        """The counters after one more optimizer step."""
        return Counters(
            step=self.step + 1,
            samples_processed=self.samples_processed + num_samples,
            tokens_processed=self.tokens_processed + num_tokens,
            positions=positions,
        )


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    counters: Counters
    files: dict[str, FileEntry]
    tensors: dict[str, str]
    """Tensor name → file."""


def checkpoint_root(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the published checkpoints, newest first."""
    found = []
    for path in root.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit() and path.is_dir():
            found.append((int(number), path))
    return sorted(found, reverse=True)


def unpublished_name(step: int) -> str:
    """Folder in which the checkpoint of ``step`` is built."""
    return f".step_{step}.new"


@contextlib.contextmanager
def writing(root: Path, step: int) -> Iterator[None]:
    """What the disk refuses becomes one `CheckpointError`, and what was written of it makes room again."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(root / unpublished_name(step), ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be written in {root}: {error}; earlier ones are intact"
        ) from error


class CheckpointWriter:
    """Builds one checkpoint in a hidden folder; ``publish`` makes it appear at once."""

    def __init__(self, root: Path, step: int):
        self.root, self.step = root, step
        root.mkdir(parents=True, exist_ok=True)
        self.path = root / unpublished_name(step)
        if self.path.exists():
            shutil.rmtree(self.path)
        self.path.mkdir()
        self._tensors: dict[str, str] = {}

    def write_state(self, state: Iterable[tuple[str, dict[str, Tensor]]]) -> None:
        """Save named training states, a shard at a time."""
        for number, shard in enumerate(_shards(state)):
            name = f"state-{number:05d}.safetensors"
            save_file(shard, self.path / name)
            self._tensors |= dict.fromkeys(shard, name)

    def publish(self, counters: Counters) -> Path:
        """Sync everything and rename; returns the published folder."""
        files = {
            str(path.relative_to(self.path)): FileEntry(size=path.stat().st_size, crc32=_crc32(path))
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }
        manifest = Manifest(format=FORMAT, counters=counters, files=files, tensors=self._tensors)
        (self.path / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        for path in (*self.path.rglob("*"), self.path):
            _sync(path)
        target = self.root / f"step_{self.step}"
        old = self.root / f".step_{self.step}.old"
        if target.exists():
            os.rename(target, old)
        os.rename(self.path, target)
        shutil.rmtree(old, ignore_errors=True)
        _sync(self.root)
        return target


class CheckpointReader:
    """A published checkpoint; ``verify`` refuses one with a file of another size or checksum than was written."""

    def __init__(self, path: Path, verify: bool = True):
        self.path = path
        self.manifest = _read_manifest(path)
        if verify:
            _verify_files(path, self.manifest)
        self._open: dict[str, safe_open] = {}

    @property
    def counters(self) -> Counters:
        return self.manifest.counters

    def state(self, name: str) -> dict[str, Tensor]:
        """Training state of the parameter ``name``."""
        prefix = f"{name}."
        keys = ("param", "exp_avg", "exp_avg_sq")
        if f"{prefix}param" not in self.manifest.tensors:
            raise CheckpointError(f"{self.path}: no state of parameter {name!r}; was it written for another model?")
        return {key: self._tensor(prefix + key) for key in keys if prefix + key in self.manifest.tensors}

    def rng(self, rank: int) -> dict[str, Tensor] | None:
        """Generator states of ``rank``; None when fewer ranks wrote."""
        path = self.path / _rng_name(rank)
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def _tensor(self, key: str) -> Tensor:
        name = self.manifest.tensors[key]
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, "pt")
        return self._open[name].get_tensor(key)


def newest_valid(root: Path) -> CheckpointReader | None:
    """The newest checkpoint that is whole; damaged ones are named in the log and passed over."""
    for _, path in list_checkpoints(root):
        try:
            return CheckpointReader(path)
        except CheckpointError as error:
            log.error("checkpoint skipped path=%s reason=%s", path, error)
    return None


def prune(root: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints and what unfinished writers left; returns those kept."""
    for leftover in root.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    paths = [path for _, path in list_checkpoints(root)]
    for path in paths[keep:]:
        doomed = path.with_name(f".{path.name}.old")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return paths[:keep]


def save_rng(folder: Path, rank: int, device: torch.device) -> None:
    """Generators of this rank; every rank writes its own file before the publication."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    save_file(states, folder / _rng_name(rank))


def restore_rng(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def read_counters(path: Path) -> Counters:
    """Counters of a checkpoint, without checking its files."""
    return _read_manifest(path).counters


def _rng_name(rank: int) -> str:
    return f"rng-{rank}.safetensors"


def _shards(state: Iterable[tuple[str, dict[str, Tensor]]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensors in state:
        for key, tensor in tensors.items():
            shard[f"{name}.{key}"] = tensor.detach().to("cpu", torch.float32).contiguous()
            size += tensor.numel() * 4
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}, this version reads {FORMAT}")
    return manifest


def _verify_files(path: Path, manifest: Manifest) -> None:
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry.size:
            raise CheckpointError(f"{file} is missing or not {entry.size} bytes long")
        if _crc32(file) != entry.crc32:
            raise CheckpointError(f"{file} fails its checksum")


def _crc32(path: Path, block: int = 8 * 2**20) -> int:
    value = 0
    with open(path, "rb") as file:
        while data := file.read(block):
            value = zlib.crc32(data, value)
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_exported_dtype(folder: Path, dtype: str) -> None:
    """Name the dtype of the exported weights in the model's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config, indent=2) + "\n")
