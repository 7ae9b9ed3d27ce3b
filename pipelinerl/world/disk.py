"""Atomic writes and syncs of files and folders: a file is replaced completely or not at all. Paths and patterns."""

import atexit
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, content: bytes | str, *, mode: int = 0o666, sync: bool = False) -> None:
    """Writes a file atomically: a reader sees the old content or the new, never a part.

    Args:
        path: its folder must exist.
        content: text is written as UTF-8.
        mode: permission bits, before the umask is applied.
        sync: return only when content and name are on the disk.
    """
    with replacement(path, mode=mode, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacement(path: Path, *, mode: int = 0o666, sync: bool = False) -> Iterator[BinaryIO]:
    """Opens a file that replaces ``path`` when the block ends without an error. Arguments: see ``replace_file``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            if sync:  # before the name, so that a power cut leaves no empty file
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def make_folder(path: Path, *, sync: bool = True) -> None:
    """Makes a folder and its parents. ``sync``: return only when their names are on the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing if sync else ():
        sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """Waits until a file's content, or a folder's entries, are on the disk, also if another process wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing_part(path: Path) -> Path:
    """Returns the path, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def matching(pattern: str) -> list[str]:
    """Returns the paths that a pattern matches, in order. A folder of that very name is no pattern (`/runs/a[1]`)."""
    folder = existing_part(Path(pattern))
    found = glob.glob(os.path.relpath(pattern, folder), root_dir=folder, recursive=True)
    return sorted(str(folder / name) for name in found)


def plain_path(text: str) -> str:
    """Returns a link to a folder whose path is a pattern, for a library that expands patterns (vLLM), else the text.

    The link is deleted with this process.
    """
    if glob.escape(text) == text or not os.path.isdir(text):
        return text
    folder = tempfile.mkdtemp(prefix="link-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    link = os.path.join(folder, re.sub(r"[*?\[\]]", "_", os.path.basename(os.path.normpath(text))))
    os.symlink(os.path.abspath(text), link)
    return link
