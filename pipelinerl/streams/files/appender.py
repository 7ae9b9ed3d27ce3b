"""The writer of a stream in files: appends frames, begins segments, deletes segments that every reader has passed."""

import fcntl
import logging
import os
import socket
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.streams import frames
from pipelinerl.streams.base import Appender
from pipelinerl.streams.files.folder import (
    agreed_end,
    check_needed,
    clear_errors,
    reader_positions,
    segment_bases,
    segment_path,
)
from pipelinerl.streams.files.segment import MAGIC, End, RecordPlace, Segment, scan
from pipelinerl.streams.spec import SingleStreamSpec
from pipelinerl.world.disk import make_folder, sync_path


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

log = logging.getLogger(__name__)

Fsync = Literal["never", "segment", "always"]


class FilesAppender(Appender):
    def __init__(self, spec: SingleStreamSpec, segment_bytes: int, fsync: Fsync, max_bytes: int):
        self._path = spec.path
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._size = 0
        self._last: RecordPlace | None = None
        self._damaged = False
        self._unsynced = True
        """Whether the current segment may hold data that is not on disk."""
        with clear_errors("write", self._path):
            make_folder(self._path, sync=fsync != "never")
            self._lock = WriterLock(self._path)
            try:
                self._recover()
            except BaseException:
                self._lock.release()
                raise

    def append(self, payload: bytes) -> int:
        if self._damaged:
            raise StreamError(f"{self._path}: closed, or a failed write could not be undone; open the stream again")
        offset = self.next_offset
        with clear_errors(f"append record {offset} ({len(payload)} bytes) to", self._path):
            new_segment = self._fd is None or self._size >= self._segment_bytes
            if new_segment:
                self._begin_segment()
            self._write(frames.header(offset, payload), payload)
            self._last = RecordPlace(self._base, self._size, offset)
            self._size += frames.HEADER_BYTES + len(payload)
            self.next_offset = offset + 1
            if new_segment:
                self._collect()
        return offset

    def last(self) -> bytes | None:
        if self._last is None:
            return None
        base, start, offset = self._last
        with clear_errors("read", self._path):
            segment = Segment(self._path, base, self._max_bytes, offset=offset, start=start)
            try:
                records = segment.read(1)
            finally:
                segment.close()
        if not records:
            raise CorruptStreamError(f"{self._path}: record {offset}, the newest one, is no longer there")
        return bytes(records[0][1])

    def sync(self) -> None:
        if self._fd is not None and self._unsynced and self._fsync != "never":
            with clear_errors("sync", self._path):
                os.fdatasync(self._fd)
            self._unsynced = False

    def close(self) -> None:
        self._damaged = True
        with clear_errors("close", self._path):
            try:
                self._end_segment()
            finally:
                self._lock.release()

    def _recover(self) -> None:
        """Finds the next offset, cuts off a frame that a killed writer left incomplete, and skips harmless damage."""
        bases = segment_bases(self._path)
        end = self._scan(bases[-1]) if bases else End(0, None, None)
        self._last = end.last
        if bases and end.last is None and len(bases) > 1:
            before = self._scan(bases[-2])
            self._last = before.last
            if before.next_offset != bases[-1]:
                path = segment_path(self._path, bases[-2])
                gap = f"{path} ends before record {before.next_offset}, but the next segment begins with {bases[-1]}"
                check_needed(self._path, before.next_offset, bases[-1], gap)
        self.next_offset = agreed_end(self._path, end.next_offset)
        if self._last is not None and self._last.offset + 1 != self.next_offset:
            self._last = None  # the newest record was lost, and every reader has passed it
        if end.size is None or end.last is None or self.next_offset > end.next_offset:
            return  # the next append begins a segment
        self._base, self._size = bases[-1], end.size
        self._fd = os.open(segment_path(self._path, self._base), os.O_WRONLY | os.O_APPEND)
        self._cut_off(os.fstat(self._fd).st_size - end.size)

    def _scan(self, base: int) -> End:
        end = scan(self._path, base, self._max_bytes)
        for damage in end.damages:
            check_needed(self._path, damage.first, damage.end, damage.reason)
            log.warning("event=damage_passed_over stream=%s reason=%s", self._path, damage.reason)
        return end

    def _cut_off(self, surplus: int) -> None:
        """Removes ``surplus`` bytes after the last complete frame."""
        assert self._fd is not None
        if surplus:
            log.warning(
                "event=torn_tail stream=%s bytes=%d next_offset=%d note=cut off", self._path, surplus, self.next_offset
            )
            os.ftruncate(self._fd, self._size)
            if self._fsync != "never":
                os.fsync(self._fd)

    def _begin_segment(self) -> None:
        self._end_segment()
        path = segment_path(self._path, self.next_offset)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.write(fd, MAGIC)
            if self._fsync != "never":
                sync_path(self._path)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._base, self._size = fd, self.next_offset, len(MAGIC)

    def _end_segment(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                if self._fsync != "never":
                    os.fsync(fd)
            finally:
                os.close(fd)

    def _write(self, header: bytes, payload: bytes) -> None:
        """Appends the frame completely, or undoes the write and raises."""
        assert self._fd is not None, "append begins a segment first"
        try:
            written = os.writev(self._fd, (header, payload))
            if written < len(header) + len(payload):
                rest = memoryview(header + payload)[written:]
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            self._unsynced = True
            if self._fsync == "always":
                self.sync()
        except BaseException:
            self._damaged = True
            os.ftruncate(self._fd, self._size)
            self._damaged = False
            raise

    def _collect(self) -> None:
        """Deletes the segments that every named reader has passed, but never the newest segment."""
        positions = reader_positions(self._path).values()
        if not positions:
            return
        passed = [base for base, end in pairwise(segment_bases(self._path)) if end <= min(positions)]
        if passed and self._fsync != "never":
            sync_path(self._path / "readers")  # positions must be durable before the deletions that they allow
        for base in passed:
            segment_path(self._path, base).unlink()
