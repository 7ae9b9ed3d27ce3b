"""Atomic writes and syncs of files and folders: a file is replaced completely or not at all."""

import os
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
        sync: return only when content and name are on the disk. The content is synced first, so that a power cut
            leaves no empty file.
    """
    with replacement(path, mode=mode, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacement(path: Path, *, mode: int = 0o666, sync: bool = False) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of ``path`` when the block ends. If the block raises, ``path`` stays as it is.

    ``replace_file`` explains the arguments.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def make_folder(path: Path, *, sync: bool = True) -> None:
    """Makes a folder and its parents. With ``sync`` it returns only when their names are on the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing if sync else ():
        sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """Waits until a file's content, or a folder's entries (names, renames, deletions), are on the disk.

    This includes what other processes wrote: fsync works through any descriptor of the file.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
