"""For processes of a recorded run: tells the recorder of every sync, rename and deletion in the run folder.

Python imports this module at its start where the folder of this file is in PYTHONPATH. The process goes on when the
recorder has looked at the disk.
"""

import os
import socket
from typing import Any

ADDRESS, ROOT = os.environ.get("POWER_CUT_RECORDER"), os.environ.get("POWER_CUT_ROOT", "/")


def record(event: str, path: str) -> None:
    if not os.path.abspath(path).startswith(ROOT):
        return
    try:
        with socket.socket(socket.AF_UNIX) as recorder:
            recorder.connect(ADDRESS)
            recorder.sendall(f"{event} {os.path.abspath(path)}".encode())
            recorder.shutdown(socket.SHUT_WR)
            recorder.recv(1)
    except OSError:
        pass  # the recording is over


def hook(name: str) -> None:
    original = getattr(os, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        is_sync = name in ("fsync", "fdatasync")
        record("sync" if is_sync else name, os.readlink(f"/proc/self/fd/{args[0]}") if is_sync else os.fspath(args[0]))
        return result

    setattr(os, name, hooked)


if ADDRESS is not None:
    for each in ("fsync", "fdatasync", "replace", "rename", "unlink"):
        hook(each)
