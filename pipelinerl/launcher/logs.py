"""The logs of this node's roles: bounded on the disk, readable across the bound.

A role writes to a descriptor that it inherited, so its log is copied and cut, not renamed. A line that is written
between the two is lost.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)


def earlier(path: Path) -> Path:
    """`log.1.txt` of `log.txt`: what was written before it was cut."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def cut_logs(paths: Iterable[Path], max_bytes: int) -> None:
    """Begin every log beyond ``max_bytes`` anew; the last one stays beside it. Writers have opened it for appending."""
    for path in paths:
        try:
            if path.stat().st_size > max_bytes:
                shutil.copy2(path, earlier(path))
                os.truncate(path, 0)
        except FileNotFoundError:
            continue
        except OSError as error:  # a full disk: the log stays as it is
            log.warning("event=log_not_cut file=%s error=%s", path, error)


def last_lines(path: Path, tail_bytes: int) -> list[str]:
    """The newest lines that are not blank, of the log before this one too when this one is shorter."""
    text, missing = b"", tail_bytes
    for part in (path, earlier(path)):
        with contextlib.suppress(OSError), open(part, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - missing))
            text = stream.read() + text
        missing = tail_bytes - len(text)
        if missing <= 0:
            break
    return [line.rstrip() for line in text.decode(errors="replace").splitlines() if line.strip()]
