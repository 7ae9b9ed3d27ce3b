"""Writes and reads checkpoints. A checkpoint on disk is either complete or absent.

A checkpoint is a folder `checkpoints/step_<n>/`. All ranks write it under another name and sync it, then one rename
publishes it:

    manifest.json                              counters, stream positions, files with size and CRC
    shard-<rank>-model-<n>-of-<N>.safetensors  that rank's pieces of the flattened states `<parameter>.param`,
                                               `.exp_avg`, `.exp_avg_sq` in float32, and its generators
                                               `rng.<rank>.<device>`, and inside a block of steps with one
                                               proximal policy its log-probabilities, `proximal.<rank>`.
                                               Of rank 0 in float16 `loss_scale`

The files have the format of torch's distributed checkpoint in its Hugging Face storage. Each file records which ranges
it holds, so any engine on any number of ranks can resume. Nothing on disk is pickled.
"""

import logging
import os
import shutil
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from pipelinerl.config.paths import CHECKPOINTS
from pipelinerl.errors import CheckpointError
from pipelinerl.finetune.pieces import Piece, PieceLoadPlanner, Pieces, PieceSavePlanner
from pipelinerl.finetune.rendezvous import Peers
from pipelinerl.records import DataOrder, MicroBatch
from pipelinerl.world.disk import make_folder, sync_path

log = logging.getLogger(__name__)

FORMAT = 2
"""Raised when older code could misread a checkpoint."""
FILE_BYTES = 2**30
"""Approximate size of one file. A rank assembles each file in memory before it writes it."""
MANIFEST = "manifest.json"


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of training and of its input streams."""

    step: int = 0
    """Number of finished optimizer steps, which is also the version of the weights."""
    samples_processed: int = 0
    tokens_processed: int = 0
    positions: dict[str, int] = {}
    """Next offset to read in each `training_data` stream, by `<instance>/<partition>`."""
    epoch: int = 1
    """Epoch of the streams that the positions belong to (`streams.epoch`)."""
    orders: dict[int, DataOrder] = {}
    """Which problems are resolved, by actor replica. A run with new streams resumes from this."""
    proximal_made_at: int | None = None
    """Inside a block of steps that share a proximal policy: the step whose weights this is. The checkpoint then holds
    its log-probabilities for the rest of the block, in these streams."""

    def after(
        self, first: MicroBatch, positions: dict[str, int], replica: int, proximal_made_at: int | None = None
    ) -> "Counters":
        """The counters after one more optimizer step, which began with micro-batch ``first``.

        Args:
            positions: of the streams after the step.
            replica: number of the preprocessor that packed the step.
            proximal_made_at: the field of the new counters.
        """
        return Counters(
            step=self.step + 1,
            samples_processed=self.samples_processed + first.num_samples,
            tokens_processed=self.tokens_processed + first.num_tokens,
            positions=positions,
            epoch=self.epoch,
            orders=self.orders | ({replica: first.order} if first.order is not None else {}),
            proximal_made_at=proximal_made_at,
        )


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    counters: Counters
    files: dict[str, FileEntry]
    crc32: int | None = None
    """Checksum of the manifest's counters and files. None in manifests of earlier versions."""

    def checksum(self) -> int:
        return zlib.crc32(msgspec.json.encode((self.counters, self.files)))


def checkpoint_root(run_dir: Path) -> Path:
    return run_dir / CHECKPOINTS


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the published checkpoints or exports in ``root``, newest first."""
    found = []
    for path in root.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit() and path.is_dir():
            found.append((int(number), path))
    return sorted(found, reverse=True)


def unpublished_name(step: int) -> str:
    """Name of the folder in which the checkpoint or export of ``step`` is built."""
    return f".step_{step}.new"


def begin(peers: Peers, root: Path, step: int) -> Path:
    """Make an empty folder for ``step`` in ``root`` that all ranks write into. Collective.

    Raises:
        CheckpointError: on all ranks, if a rank does not see the folder.
    """
    folder = root / unpublished_name(step)

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)

    def find() -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}, made by rank 0, is not there: trainer ranks must share `output_dir`")

    peers.together(make if peers.rank == 0 else lambda: None)
    peers.together(find)
    return folder


def publish(folder: Path, target: Path) -> None:
    """Rename ``folder``, whose files are synced, to ``target``, and make the rename durable."""
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync_path(path)
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        os.rename(target, old)
    os.rename(folder, target)
    sync_path(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def write(peers: Peers, root: Path, pieces: Pieces, counters: Counters) -> Path:
    """Write and publish a checkpoint in folder ``root``, and return its folder. Collective.

    Args:
        pieces: this rank's pieces, on the CPU. The pieces of all ranks cover each tensor exactly once.
        counters: with the positions of this rank's streams.

    Raises:
        CheckpointError: on all ranks. Earlier checkpoints are intact.
    """
    folder, target = root / unpublished_name(counters.step), root / f"step_{counters.step}"
    try:
        begin(peers, root, counters.step)
        entries = _write_files(peers, folder, pieces)
        positions = {key: value for each in peers.gather(counters.positions) for key, value in each.items()}

        def finish() -> None:
            whole = msgspec.structs.replace(counters, positions=positions)
            manifest = Manifest(format=FORMAT, counters=whole, files=entries)
            manifest = msgspec.structs.replace(manifest, crc32=manifest.checksum())
            (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
            sync_path(folder / MANIFEST)
            publish(folder, target)

        peers.together(finish if peers.rank == 0 else lambda: None)
    except CheckpointError as error:
        if peers.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # free its disk space
        raise CheckpointError(
            f"the checkpoint of step {counters.step} cannot be written in {root}: {error}; earlier ones are intact"
        ) from error
    return target


def _write_files(peers: Peers, folder: Path, pieces: Pieces) -> dict[str, FileEntry]:
    """Write this rank's files and return the entries of all ranks' files. Collective."""
    planner = PieceSavePlanner(pieces)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_numbers(pieces), save_distributed=True)
    plans = peers.together(lambda: writer.prepare_local_plan(planner.create_local_plan()))

    def write_mine() -> dict[str, FileEntry]:
        plan = writer.prepare_global_plan(planner.create_global_plan(plans)[0])[peers.rank]
        results = writer.write_data(planner.finish_plan(plan), planner).wait()
        names = sorted({result.storage_data.relative_path for result in results})
        return {name: _synced_entry(folder / name) for name in names}

    return {name: entry for entries in peers.together(write_mine) for name, entry in entries.items()}


def _file_numbers(pieces: Pieces) -> dict[str, int]:
    """Number of the file for each piece, from 1. A file holds about ``FILE_BYTES``."""
    numbers, size = {}, 0
    for name, piece in pieces.items():
        numbers[name] = 1 + size // FILE_BYTES
        size += piece.num_bytes
    return numbers


def _synced_entry(path: Path) -> FileEntry:
    sync_path(path)
    return FileEntry(size=path.stat().st_size, crc32=_crc32(path))


def newest_whole(peers: Peers, root: Path) -> tuple[Path, Counters] | None:
    """The newest checkpoint in ``root`` whose files all match its manifest. Logs each skipped one. Collective."""
    for _, path in peers.gather(list_steps(root) if peers.rank == 0 else [])[0]:
        try:
            return path, peers.together(partial(_verify, path, peers.rank, peers.world_size))[0]
        except CheckpointError as error:
            log.error("event=checkpoint_skipped path=%s reason=%s", path, error)
    return None


def _verify(path: Path, rank: int, world_size: int) -> Counters:
    """Check this rank's share of the files against the manifest."""
    manifest = _read_manifest(path)
    for name, entry in list(manifest.files.items())[rank::world_size]:
        file = path / name
        if not file.is_file() or file.stat().st_size != entry.size:
            raise CheckpointError(f"{file} is missing or not {entry.size} bytes long")
        if _crc32(file) != entry.crc32:
            raise CheckpointError(f"{file} fails its checksum")
    return manifest.counters


def read(path: Path, pieces: Pieces, optional: Pieces | None = None) -> set[str]:
    """Fill ``pieces`` from the checkpoint at ``path`` and return the names that were found.

    Args:
        optional: more pieces to fill, which the checkpoint may lack.
    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    storage = HuggingFaceStorageReader(str(path))
    metadata = storage.read_metadata()
    known = metadata.state_dict_metadata
    for name, piece in pieces.items():
        if name not in known or known[name].size != piece.size():
            held = f"{known[name].size[0]} numbers" if name in known else "nothing"
            raise CheckpointError(
                f"{path} holds {held} of {name!r}, which has {piece.whole}; was it written for another model?"
            )
    found = {**pieces, **{name: piece for name, piece in (optional or {}).items() if name in known}}
    storage.set_up_storage_reader(metadata, is_coordinator=False)
    planner = PieceLoadPlanner(found, metadata)
    storage.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    return set(found)


def byte_piece(data: bytes) -> Piece:
    """A piece of a rank's own, of any length."""
    return Piece(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, len(data))


def read_bytes(path: Path, name: str) -> bytes | None:
    """The bytes of a `byte_piece` in the checkpoint at ``path``. None: it has none of this name."""
    known = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    if name not in known:
        return None
    tensor = torch.empty(known[name].size, dtype=torch.uint8)
    read(path, {name: Piece(tensor, 0, len(tensor))})
    return tensor.numpy().tobytes()


def proximal_name(rank: int) -> str:
    return f"proximal.{rank}"


def prune(root: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` steps, and folders of unfinished writers. Returns the kept folders."""
    for leftover in root.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    paths = [path for _, path in list_steps(root)]
    for path in paths[keep:]:
        doomed = path.with_name(f".{path.name}.old")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return paths[:keep]


def rng_pieces(rank: int, device: torch.device) -> dict[str, Piece]:
    """The current states of this rank's random generators, on the CPU and on ``device``."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"rng.{rank}.{kind}": Piece(state, 0, len(state)) for kind, state in states.items()}


def restore_rng(pieces: Pieces, names: Iterable[str], device: torch.device) -> None:
    """Set this rank's random generators to those states in ``pieces`` whose names are in ``names``."""
    for name in pieces.keys() & set(names):
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(pieces[name].tensor, device)
        else:
            torch.set_rng_state(pieces[name].tensor)


def read_counters(path: Path) -> Counters:
    """Counters of a checkpoint, without checking its files."""
    return _read_manifest(path).counters


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}, this version reads {FORMAT}")
    if manifest.crc32 not in (None, manifest.checksum()):
        raise CheckpointError(f"{path / MANIFEST} fails its checksum")
    return manifest


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while data := file.read(8 * 2**20):
            value = zlib.crc32(data, value)
    return value
