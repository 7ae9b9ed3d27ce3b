"""Bounds the logs of this node's roles on the disk, and finds in one why its role ended.

A role writes to a descriptor that it inherited, so its log is copied and truncated instead of renamed. A line that is
written between the copy and the truncation is lost.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

ROLE_FAILED = "event=role_failed reason="
"""Stands before the error in a failed role's last log line (`membership.role`)."""
ABOVE = re.compile("root cause|error is above")
"""A server's last line if its engine, a process of its own, has failed."""
ENGINE_LINE = re.compile(r"(?:(\((?:Engine|\w*Worker)[^)]* pid=\d+\)) ERROR [^]]*\] ?)?(.*)", re.DOTALL)
"""Process and text of an error line of an engine or its workers. Any other line has no process."""
LEVEL = re.compile(r"(?:\([^)]*\) )?(?:[\d.:-]+ |\[)*(DEBUG\b|INFO\b|WARNING\b|ERROR\b|CRITICAL\b|[IWEF]\d{4} )")
"""The level in a line of ours, of vLLM's (after the process's name), or of torch's C++ libraries (after a bracket)."""


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


def last_error_line(log_path: Path, tail_bytes: int = 2**18, *, since: int = 0) -> str:
    """Return the line of a log that best explains why its role ended: its last error, never a warning or a note.

    Without an error it is the last line, such as `Killed`. Bytes before ``since`` are left out, if the log was not cut.
    """
    newer = length_of(log_path) - since
    lines = last_lines(log_path, min(newer, tail_bytes) if since and newer >= 0 else tail_bytes)
    errors, is_note = [], False
    for line in lines:
        if level := LEVEL.match(line):
            is_note = level[1][0] not in "ECF"
        elif not line[0].isspace():
            is_note = False
        if not is_note and (level or "Error: " in line or "error: " in line):
            errors.append(line)
    for line in reversed(errors):
        if ROLE_FAILED in line:
            reason = line.partition(ROLE_FAILED)[2]
            return (first_raised(lines) if ABOVE.search(reason) else "") or reason
    if errors:
        return errors[-1]
    if lines and not is_note:
        return lines[-1]
    return "no error in its log" if lines else "its log is empty"


def first_raised(lines: Iterable[str]) -> str:
    """Return the first exception that an engine logged, or that ended its process. Empty if there is none."""
    tracebacks, found, before = set[str](), dict[bool, str](), ""
    for line in lines:
        process, text = ENGINE_LINE.findall(line)[0]
        if text.startswith("Traceback (") and (process or before.startswith("Process ")):
            tracebacks.add(process)
        elif process in tracebacks and text[:1].strip() and (process or not LEVEL.match(text)):
            tracebacks.discard(process)
            found.setdefault(bool(process), text)
        before = line
    return found.get(True) or found.get(False, "")
