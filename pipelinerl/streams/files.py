"""Streams as files: one folder per stream, records in segments, readers' positions beside them.

    <run>/streams/<topic>/<instance>/<partition>/
        00000000000000000000.log    magic, then frames; the name is the offset of its first record
        readers/<name>              durable position of a named reader, in digits
        writer.lock                 held (flock) by the one writer, with its process id and host

Only the newest segment grows. A writer killed in mid-write leaves an incomplete last frame, which the next writer cuts
off and readers take for "not yet written"; bytes that fail a checksum are an error for both. Segments below every named
reader's position are deleted by the writer when it begins a new one; without a named reader nothing is deleted.

``fsync``: ``never`` leaves writing back to the kernel (a killed process loses nothing, a power cut may), ``segment``
syncs a segment when it is full or closed, ``always`` syncs every record before ``append`` returns.

A waiting reader sleeps until the kernel reports a write in the folder (``wakeup``).
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from pipelinerl.errors import ConfigError, CorruptStreamError, StreamError
from pipelinerl.streams import frames
from pipelinerl.streams.base import MAX_RECORDS_PER_READ, Appender, Backend, Cursor, StreamStats
from pipelinerl.streams.frames import Buffer
from pipelinerl.streams.spec import SingleStreamSpec
from pipelinerl.streams.wakeup import FolderWatch

log = logging.getLogger(__name__)

Fsync = Literal["never", "segment", "always"]

MAGIC = b"PRLLOG1\n"
_READ_BYTES = 4 << 20
_GAP_CHECK_S = 1.0
_REREADS = 3
_REREAD_PAUSE_S = 0.02
_READER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class FilesBackend(Backend):
    """Streams in the run folder.

    Args:
        segment_mb: a segment that has reached this size is followed by a new one.
        fsync: see the module's head.
        max_record_mb: larger records are refused by the writer and by the reader.
    """

    def __init__(self, *, segment_mb: int = 64, fsync: Fsync = "segment", max_record_mb: int = 512):
        if fsync not in ("never", "segment", "always"):
            raise ConfigError(f"streams.fsync is {fsync!r}: use never, segment or always")
        if not 0 < max_record_mb < 2048:
            raise ConfigError(f"streams.max_record_mb is {max_record_mb}: it must be 1 to 2047")
        self._segment_bytes = segment_mb << 20
        self._fsync: Fsync = fsync
        self.max_record_bytes = max_record_mb << 20

    def open_appender(self, spec: SingleStreamSpec) -> Appender:
        return FilesAppender(spec, self._segment_bytes, self._fsync, self.max_record_bytes)

    def open_cursor(self, spec: SingleStreamSpec, name: str | None, start: int | None) -> Cursor:
        return FilesCursor(spec, name, start, max_bytes=self.max_record_bytes)

    def specs(self, exp_path: Path) -> list[SingleStreamSpec]:
        root = Path(exp_path) / "streams"
        found = (path.relative_to(root).parts for path in root.glob("*/*/*") if path.is_dir())
        return sorted(
            (SingleStreamSpec(exp_path, topic, int(instance), int(partition)) for topic, instance, partition in found),
            key=lambda spec: (spec.topic, spec.instance, spec.partition),
        )

    def stats(self, spec: SingleStreamSpec) -> StreamStats:
        with _clear_errors("read", spec.path):
            bases = _bases(spec.path)
            size = sum(_segment_path(spec.path, base).stat().st_size for base in bases)
            end = _scan(spec.path, bases[-1], self.max_record_bytes).next_offset if bases else 0
            return StreamStats(
                spec=spec,
                first_offset=bases[0] if bases else 0,
                next_offset=end,
                size_bytes=size,
                positions=_positions(spec.path),
            )

    def delete(self, spec: SingleStreamSpec) -> None:
        with _clear_errors("delete", spec.path):
            if spec.path.exists():
                shutil.rmtree(spec.path)


class FilesAppender(Appender):
    def __init__(self, spec: SingleStreamSpec, segment_bytes: int, fsync: Fsync, max_bytes: int):
        self._path = spec.path
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._size = 0
        self._last: _Place | None = None
        self._damaged = False
        with _clear_errors("write", self._path):
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = _WriterLock(self._path)
            try:
                self._recover()
            except BaseException:
                self._lock.release()
                raise

    def append(self, payload: bytes) -> int:
        if self._damaged:
            raise StreamError(f"{self._path}: closed, or a failed write could not be undone; open the stream again")
        offset = self.next_offset
        with _clear_errors(f"append record {offset} ({len(payload)} bytes) to", self._path):
            new_segment = self._fd is None or self._size >= self._segment_bytes
            if new_segment:
                self._begin_segment()
            self._write(frames.header(offset, payload), payload)
            self._last = _Place(self._base, self._size, offset)
            self._size += frames.HEADER_BYTES + len(payload)
            self.next_offset = offset + 1
            if new_segment:
                self._collect()
        return offset

    def last(self) -> bytes | None:
        if self._last is None:
            return None
        base, start, offset = self._last
        with _clear_errors("read", self._path):
            segment = _Segment(self._path, base, self._max_bytes, offset=offset, start=start)
            try:
                records = segment.read(1)
            finally:
                segment.close()
        if not records:
            raise CorruptStreamError(f"{self._path}: record {offset}, the newest one, is no longer there")
        return bytes(records[0][1])

    def close(self) -> None:
        self._damaged = True
        with _clear_errors("close", self._path):
            try:
                self._end_segment()
            finally:
                self._lock.release()

    def _recover(self) -> None:
        """Finds the end of the log; cuts off what a killed writer left incomplete."""
        bases = _bases(self._path)
        self.next_offset = 0
        if not bases:
            return
        end = _scan(self._path, bases[-1], self._max_bytes)
        path = _segment_path(self._path, bases[-1])
        self._base, self._size, self._last, self.next_offset = bases[-1], end.size, end.last, end.next_offset
        if end.last is None and len(bases) > 1:
            before = _scan(self._path, bases[-2], self._max_bytes)
            if before.next_offset != bases[-1]:
                raise CorruptStreamError(
                    f"{_segment_path(self._path, bases[-2])} ends before record {before.next_offset}, but the next "
                    f"segment begins with record {bases[-1]}: records are missing"
                )
            self._last = before.last
        if end.last is None:
            return  # the next append writes this segment from its beginning
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        surplus = os.fstat(self._fd).st_size - end.size
        if surplus:
            log.warning(
                "event=torn_tail stream=%s bytes=%d next_offset=%d note=cut off", self._path, surplus, self.next_offset
            )
            os.ftruncate(self._fd, end.size)

    def _begin_segment(self) -> None:
        self._end_segment()
        path = _segment_path(self._path, self.next_offset)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            os.write(fd, MAGIC)
            if self._fsync != "never":
                _fsync_folder(self._path)
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
        """Appends the frame whole or not at all."""
        assert self._fd is not None, "append begins a segment first"
        try:
            written = os.writev(self._fd, (header, payload))
            if written < len(header) + len(payload):
                rest = memoryview(header + payload)[written:]
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            if self._fsync == "always":
                os.fdatasync(self._fd)
        except BaseException:
            self._damaged = True
            os.ftruncate(self._fd, self._size)
            self._damaged = False
            raise

    def _collect(self) -> None:
        """Deletes the segments that every named reader has passed; the newest one stays."""
        positions = _positions(self._path).values()
        if not positions:
            return
        bases = _bases(self._path)
        for base, end in pairwise(bases):
            if end > min(positions):
                return
            _segment_path(self._path, base).unlink()


class FilesCursor(Cursor):
    def __init__(self, spec: SingleStreamSpec, name: str | None, start: int | None, *, max_bytes: int):
        self._path = spec.path
        self._max_bytes = max_bytes
        self._segment: _Segment | None = None
        self._position_file: Path | None = None
        self._committed = 0
        with _clear_errors("read", self._path):
            durable = None if name is None else self._durable_position(name)
            if start is None:
                start = durable
            self._watch = FolderWatch(self._path)
            try:
                bases = _bases(self._path)
                self.position = start if start is not None else (bases[0] if bases else 0)
                self._seek(bases)
                if name is not None and durable is None:
                    self._register()
            except BaseException:
                self.close()
                raise

    def read(self, timeout_s: float) -> list[tuple[int, Buffer]]:
        deadline = time.monotonic() + timeout_s
        next_gap_check = time.monotonic() + _GAP_CHECK_S
        with _clear_errors("read", self._path):
            while True:
                records = self._available()
                now = time.monotonic()
                if not records and now >= min(next_gap_check, deadline):
                    records = self._check_gap()
                    next_gap_check = now + _GAP_CHECK_S
                if records or now >= deadline:
                    return records
                self._watch.wait(min(next_gap_check, deadline) - now)

    def commit(self, offset: int) -> None:
        if self._position_file is None:
            raise StreamError(f"{self._path}: a reader without a name has no durable position to commit")
        if offset > self._committed:
            with _clear_errors("commit a position to", self._position_file):
                _replace(self._position_file, f"{offset}\n")
            self._committed = offset

    def close(self) -> None:
        self._watch.close()
        self._close_segment()

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _durable_position(self, name: str) -> int | None:
        """The named reader's position, or None when it never read this stream."""
        if not _READER_NAME.fullmatch(name):
            raise StreamError(f"reader name is {name!r}: use letters, digits, '_', '-' and '.'")
        self._position_file = self._path / "readers" / name
        durable = _read_position(self._position_file)
        self._committed = durable or 0
        return durable

    def _register(self) -> None:
        """Makes the position of a new reader durable, so that nothing behind it is deleted from now on."""
        assert self._position_file is not None
        self._position_file.parent.mkdir(parents=True, exist_ok=True)
        _replace(self._position_file, f"{self.position}\n")
        self._committed = self.position

    def _seek(self, bases: list[int]) -> None:
        """Opens the segment of ``position`` just before that record."""
        if bases and self.position < bases[0]:
            raise StreamError(
                f"{self._path}: record {self.position} is no longer there, the oldest is {bases[0]}: every "
                "named reader had passed it"
            )
        base = max((base for base in bases if base <= self.position), default=None)
        if base is not None:
            self._segment = _Segment(self._path, base, self._max_bytes)
            while self._segment.offset < self.position:
                if not self._segment.read(min(MAX_RECORDS_PER_READ, self.position - self._segment.offset)):
                    break
        end = self._segment.offset if self._segment else 0
        if end < self.position:
            raise StreamError(
                f"{self._path}: a reader wants to begin at record {self.position}, but the stream ends before "
                f"record {end}: its end was lost (a power cut without fsync=always?) or these are another run's streams"
            )

    def _available(self) -> list[tuple[int, Buffer]]:
        """Records that can be read now."""
        records = self._read_segment()
        if not records and (self._segment is None or self._segment.base != self.position):
            try:
                following = _Segment(self._path, self.position, self._max_bytes)
            except FileNotFoundError:
                return []
            self._close_segment()
            self._segment = following
            records = self._read_segment()
        if self._segment is not None:
            self.position = self._segment.offset
        return records

    def _read_segment(self) -> list[tuple[int, Buffer]]:
        """Reads on; a mismatch counts only when it stays, because a recovering writer may be replacing a torn frame."""
        if self._segment is None:
            return []
        for _ in range(_REREADS):
            try:
                return self._segment.read(MAX_RECORDS_PER_READ)
            except CorruptStreamError:
                time.sleep(_REREAD_PAUSE_S)
        return self._segment.read(MAX_RECORDS_PER_READ)

    def _check_gap(self) -> list[tuple[int, Buffer]]:
        """Raises when newer segments exist but the record at ``position`` does not; otherwise what can be read now."""
        later = [base for base in _bases(self._path) if base > self.position]
        records = self._available()
        if later and not records and self.position < later[0]:
            raise CorruptStreamError(f"{self._path}: records {self.position} to {later[0] - 1} are missing")
        return records


class _Place(NamedTuple):
    """Where a record is: the base of its segment, its first byte there, its offset."""

    base: int
    start: int
    offset: int


class _End(NamedTuple):
    """End of the whole frames of a segment."""

    next_offset: int
    size: int
    last: _Place | None


class _Segment:
    """Reads the frames of one segment file in order."""

    def __init__(self, folder: Path, base: int, max_bytes: int, *, offset: int | None = None, start: int = 0):
        self.base = base
        self.offset = base if offset is None else offset
        self.start = start
        self.last_start = start
        self._path = _segment_path(folder, base)
        self._max_bytes = max_bytes
        self._fd = os.open(self._path, os.O_RDONLY)

    def read(self, limit: int) -> list[tuple[int, Buffer]]:
        """At most ``limit`` next records that are completely there."""
        size = os.fstat(self._fd).st_size
        if size <= max(self.start, len(MAGIC)):
            self._check_shrunk(size)
            return []
        if self.start == 0:
            if os.pread(self._fd, len(MAGIC), 0) != MAGIC:
                raise CorruptStreamError(f"{self._path}: not a stream segment, it does not begin with {MAGIC!r}")
            self.start = self.last_start = len(MAGIC)
        buffer = os.pread(self._fd, min(_READ_BYTES, size - self.start), self.start)
        try:
            records = self._parse(buffer, limit)
            if not records and len(buffer) == _READ_BYTES and (wanted := self._large_frame(buffer, size)):
                records = self._parse(os.pread(self._fd, wanted, self.start), 1)
        except CorruptStreamError as error:
            raise CorruptStreamError(f"{self._path}, byte {self.start}: {error}") from error
        return records

    def close(self) -> None:
        os.close(self._fd)

    def _parse(self, buffer: bytes, limit: int) -> list[tuple[int, Buffer]]:
        records: list[tuple[int, Buffer]] = []
        start = 0
        while len(records) < limit:
            try:
                frame = frames.parse(buffer, start, self.offset + len(records), self._max_bytes)
            except CorruptStreamError:
                if records:
                    break  # what precedes the damage is delivered; the next call begins at the damage and raises
                raise
            if frame is None:
                break
            records.append((self.offset + len(records), frame.payload))
            self.last_start = self.start + start
            start = frame.end
        self.offset += len(records)
        self.start += start
        return records

    def _large_frame(self, buffer: bytes, size: int) -> int:
        """Length of the frame at ``start`` that is larger than one read and completely there, else 0."""
        if not any(buffer):
            raise CorruptStreamError(f"record {self.offset}: zeros where a frame should be")
        length = frames.frame_bytes(buffer)
        return length if self.start + length <= size else 0

    def _check_shrunk(self, size: int) -> None:
        if size < self.start and self.start > len(MAGIC):
            raise CorruptStreamError(f"{self._path}: shrank to {size} bytes after {self.start} had been read")


class _WriterLock:
    """The single-writer rule: an flock that ends with the process, and is not inherited by forked children."""

    _held: "weakref.WeakSet[_WriterLock]" = weakref.WeakSet()

    def __init__(self, folder: Path):
        path = folder / "writer.lock"
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip()
            self._close()
            raise StreamError(
                f"{folder} is being written by {holder or 'another process'}: a stream has one writer"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _WriterLock._held.add(self)

    def release(self) -> None:
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @classmethod
    def forget_in_child(cls) -> None:
        """A forked child shares the lock until it closes its descriptor; it must not outlive the writer with it."""
        for lock in list(cls._held):
            lock._close()


os.register_at_fork(after_in_child=_WriterLock.forget_in_child)


def _segment_path(folder: Path, base: int) -> Path:
    return folder / f"{base:020d}.log"


def _bases(folder: Path) -> list[int]:
    """First offsets of the segments, ascending; empty when there is no such stream yet."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4]) for name in names if name.endswith(".log") and name[:-4].isdigit())


def _scan(folder: Path, base: int, max_bytes: int) -> _End:
    segment = _Segment(folder, base, max_bytes)
    try:
        while segment.read(MAX_RECORDS_PER_READ):
            pass
        last = _Place(base, segment.last_start, segment.offset - 1) if segment.offset > base else None
        return _End(segment.offset, segment.start, last)
    finally:
        segment.close()


def _positions(folder: Path) -> dict[str, int]:
    """Durable position of every named reader."""
    readers = folder / "readers"
    if not readers.is_dir():
        return {}
    names = sorted(name for name in os.listdir(readers) if _READER_NAME.fullmatch(name) and not name.endswith(".tmp"))
    found = {name: _read_position(readers / name) for name in names}
    return {name: position for name, position in found.items() if position is not None}


def _read_position(path: Path) -> int | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    if not text.strip().isdecimal():
        raise CorruptStreamError(
            f"{path}: {text[:40]!r} is not a position; write the number of the next record to read"
        )
    return int(text)


def _replace(path: Path, text: str) -> None:
    """Writes a small file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _clear_errors(action: str, path: Path) -> Iterator[None]:
    """Turns an ``OSError`` into a ``StreamError`` that says what to do."""
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
