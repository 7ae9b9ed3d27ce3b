"""Bounds the logs of this node's roles on the disk and reads their last lines.

A role writes to a descriptor that it inherited, so its log is copied and truncated instead of renamed. A line that is
written between the copy and the truncation is lost.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)


def earlier(path: Path) -> Path:
    """Path of the older part of a log: `log.1.txt` for `log.txt`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def cut_logs(paths: Iterable[Path], max_bytes: int) -> None:
    """Copy every log longer than ``max_bytes`` to its `earlier` path and truncate it.

    The writers must have opened the log for appending.
    """
    for path in paths:
        try:
            if path.stat().st_size > max_bytes:
                shutil.copy2(path, earlier(path))
                os.truncate(path, 0)
        except FileNotFoundError:
            continue
        except OSError as error:  # a full disk: the log stays as it is
            log.warning("event=log_not_cut file=%s error=%s", path, error)


def length_of(path: Path) -> int:
    """Return the number of bytes of a log, 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_lines(path: Path, tail_bytes: int) -> list[str]:
    """Return the non-blank lines in the last `tail_bytes` of a log and, if it is shorter, of its `earlier` part."""
    text, missing = b"", tail_bytes
    for part in (path, earlier(path)):
        with contextlib.suppress(OSError), open(part, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - missing))
            text = stream.read() + text
        missing = tail_bytes - len(text)
        if missing <= 0:
            break
    return [line.rstrip() for line in text.decode(errors="replace").splitlines() if line.strip()]
