"""The lock that allows only one writer per stream folder."""

import fcntl
import os
import socket
import weakref
from pathlib import Path

from pipelinerl.errors import StreamError


class WriterLock:
    """An flock that ends with the process. Forked children do not keep it."""

    _held: "weakref.WeakSet[WriterLock]" = weakref.WeakSet()

    def __init__(self, folder: Path):
        path = folder / "writer.lock"
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip()
            self.close_descriptor()
            raise StreamError(
                f"{folder} is being written by {holder or 'another process'}: a stream has one writer"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        WriterLock._held.add(self)

    def release(self) -> None:
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """Closes this process's descriptor and leaves the lock to a process that shares it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @classmethod
    def forget_in_child(cls) -> None:
        """Closes the lock's descriptor in a forked child, which would otherwise hold the lock after the writer ends."""
        for lock in list(cls._held):
            lock.close_descriptor()


os.register_at_fork(after_in_child=WriterLock.forget_in_child)
