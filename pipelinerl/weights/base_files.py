"""Identifies the files of a base that a LoRA run never sends: trainer and servers read them from their own disks."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SAMPLE = 4096
"""Bytes that are read at each end of a tensor."""


def base_digest(source: str) -> str:
    """Returns the digest, as hexadecimal digits, of a model's safetensors files. Empty if it has none here.

    It covers the name, data type and shape of every tensor, and its first and last bytes.

    Args:
        source: folder, or name of a model whose files are in the hub's cache.
    """
    digest = hashlib.sha256()
    files = _files(source)
    for name, tensor in sorted(part for path in files for part in _tensors(path)):
        digest.update(json.dumps([name, tensor]).encode())
    return digest.hexdigest() if files else ""


def _files(source: str) -> list[Path]:
    index = _locate(source, INDEX)
    names = (
        [SINGLE] if index is None else sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    )
    found = [_locate(source, name) for name in names]
    return [path for path in found if path is not None] if None not in found else []


def _tensors(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yields (name, [dtype, shape, digest of its ends]) of each tensor of a file.

    A file is the length of its header (8 bytes, little-endian), the header (JSON), and the tensors' bytes.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in tensor["data_offsets"])
                yield name, [tensor["dtype"], tensor["shape"], _ends(file, start, end)]


def _ends(file: BinaryIO, start: int, end: int) -> str:
    file.seek(start)
    first = file.read(min(SAMPLE, end - start))
    file.seek(max(start, end - SAMPLE))
    return hashlib.sha256(first + file.read(min(SAMPLE, end - start))).hexdigest()


def _locate(source: str, name: str) -> Path | None:
    """Path of a model's file in its folder, or in the hub's cache. None = it has none."""
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source, name)
    return Path(found) if isinstance(found, str) else None
