"""Waits for a write in a folder without busy polling, by inotify where there is one.

inotify does not report writes from other machines on a shared file system. ``wait`` therefore always returns after a
short time, perhaps early, and callers check the folder themselves.
"""

import ctypes
import os
import select
import time
from pathlib import Path

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100  # of <sys/inotify.h>
_UNREPORTED_S = 0.1
"""Longest wait with a watch."""
_UNWATCHED_S = 0.01
"""Longest wait without a watch."""
_MISSING_S = 0.05
"""Longest wait for a folder that does not exist yet."""


class FolderWatch:
    """Reports writes and new files in one folder, which need not exist yet. Use it from one thread.

    The first ``wait`` starts the watch and returns at once, so that the caller checks the folder again.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._fd: int | None = None
        self._refused = False
        self._poll = select.poll()

    def wait(self, timeout_s: float) -> None:
        """Returns after a write since the previous call, after ``timeout_s``, or early."""
        if self._fd is not None:
            if self._poll.poll(1000 * min(timeout_s, _UNREPORTED_S)):
                os.read(self._fd, 65536)
        elif self._refused:
            time.sleep(min(timeout_s, _UNWATCHED_S))
        elif self._folder.exists():
            self._refused = not self._watch()
        else:
            time.sleep(min(timeout_s, _MISSING_S))

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _watch(self) -> bool:
        """Starts the watch. Returns False if that is not possible."""
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "inotify_init1"):
            return False
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return False
        if libc.inotify_add_watch(fd, os.fsencode(self._folder), _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE) < 0:
            os.close(fd)
            return False
        self._fd = fd
        self._poll.register(fd, select.POLLIN)
        return True
