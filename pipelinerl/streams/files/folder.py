"""The folder of one stream: segment names, durable reader positions, and errors that say how to fix them."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.streams.base import RETENTION

READER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def segment_path(folder: Path, base: int) -> Path:
    return folder / f"{base:020d}.log"


def segment_bases(folder: Path) -> list[int]:
    """Returns the first offsets of the segments, ascending. Empty if the stream does not exist yet."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4]) for name in names if name.endswith(".log") and name[:-4].isdigit())


def reader_positions(folder: Path) -> dict[str, int]:
    """Returns the durable position of every named reader."""
    readers = folder / "readers"
    if not readers.is_dir():
        return {}
    names = sorted(name for name in os.listdir(readers) if READER_NAME.fullmatch(name) and not name.endswith(".tmp"))
    found = {name: read_position(readers / name) for name in names}
    return {name: position for name, position in found.items() if position is not None}


def read_position(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    if not text.strip().isdecimal():
        raise CorruptStreamError(
            f"{path}: {text[:40]!r} is not a position; write the number of the next record to read"
        )
    return int(text)


def check_needed(folder: Path, first: int, end: int, reason: str) -> None:
    """Checks that no named reader still needs one of the lost records ``first`` … ``end - 1``.

    Raises:
        CorruptStreamError: a reader needs one of them. The message names the reader and ``reason``.
    """
    for name, position in reader_positions(folder).items():
        if position < end and name != RETENTION:
            raise CorruptStreamError(
                f"{reason}; reader {name} is at record {position} and needs {_records(max(first, position), end)}"
            )


def agreed_end(folder: Path, end: int) -> int:
    """Returns the next offset of a stream whose complete frames end before record ``end``.

    It is ``end``, or the highest reader position if the records up to there are lost and every reader has passed them.

    Raises:
        CorruptStreamError: a reader needs a lost record.
    """
    highest = max(reader_positions(folder).values(), default=0)
    if highest > end:
        check_needed(folder, end, highest, f"{folder} ends before record {end}: {_records(end, highest)} are lost")
    return max(highest, end)


def _records(first: int, end: int) -> str:
    return f"records {first} to {end - 1}"


@contextmanager
def clear_errors(action: str, path: Path) -> Iterator[None]:
    """Turns an ``OSError`` into a ``StreamError`` that says how to fix it."""
    try:
        yield
    except OSError as error:
        fixes = {
            errno.ENOSPC: "; free space there: what was written before is intact",
            errno.EDQUOT: "; raise the quota: what was written before is intact",
            errno.EROFS: "; make the run folder writable or choose another output_dir",
            errno.EACCES: "; make the run folder accessible or choose another output_dir",
        }
        raise StreamError(f"cannot {action} {path}: {error.strerror}{fixes.get(error.errno or 0, '')}") from error
