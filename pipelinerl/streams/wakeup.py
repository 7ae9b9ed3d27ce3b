"""Waiting for something to be written in a folder, without looking at it all the time.

Linux tells through inotify. Where it cannot (too many watches, another system), and for writers on another machine of
a shared file system, whose writes it does not report, ``wait`` returns by itself after a short while: it may always
return early, and callers look for themselves.
"""

import ctypes
import os
import select
import time
from pathlib import Path

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_UNREPORTED_S = 0.1
"""Longest wait where a watch exists."""
_UNWATCHED_S = 0.01
"""Longest wait where there is none."""
_MISSING_S = 0.05
"""Longest wait for a folder that does not exist yet."""


class FolderWatch:
    """Reports writes and new files in one folder, which need not exist yet. Used by one thread.

    The watch begins with the first ``wait``, which therefore returns at once: the caller looks again, and whatever is
    written from then on ends the next ``wait``.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._fd: int | None = None
        self._refused = False
        self._poll = select.poll()

    def wait(self, timeout_s: float) -> None:
        """Returns at a write since the previous call, after ``timeout_s``, or early."""
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
        """Begins the watch; returns False where that is not possible."""
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
