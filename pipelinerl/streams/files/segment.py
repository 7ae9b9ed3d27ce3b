"""Reads the frames of one segment file in order, can skip damage, and finds where the complete frames end."""

import mmap
import os
from pathlib import Path
from typing import NamedTuple

from pipelinerl.errors import CorruptStreamError
from pipelinerl.streams import frames
from pipelinerl.streams.base import MAX_RECORDS_PER_READ
from pipelinerl.streams.files.folder import segment_path
from pipelinerl.streams.frames import Buffer

MAGIC = b"PRLLOG1\n"
_READ_BYTES = 4 << 20
"""Bytes of one read. A larger frame is read alone."""
_MAX_LOST_IN_A_ROW = 1000
"""Number of following records that are searched by their offsets after a damaged header."""


class RecordPlace(NamedTuple):
    """Location of a record: the base of its segment, its first byte in the segment, its offset."""

    base: int
    start: int
    offset: int


class Damage(NamedTuple):
    """Unreadable records ``first`` … ``end - 1``. The damage begins at byte ``start`` of segment ``base``."""

    base: int
    start: int
    first: int
    end: int
    reason: str


class End(NamedTuple):
    """End of the complete frames of a segment. ``size`` is None if unreadable bytes follow the last one."""

    next_offset: int
    size: int | None
    last: RecordPlace | None
    damages: tuple[Damage, ...] = ()


class Segment:
    """Reads the frames of one segment file in order."""

    def __init__(self, folder: Path, base: int, max_bytes: int, *, offset: int | None = None, start: int = 0):
        self.base = base
        self.offset = base if offset is None else offset
        self.start = start
        self.last_start = start
        self._path = segment_path(folder, base)
        self._max_bytes = max_bytes
        self._fd = os.open(self._path, os.O_RDONLY)

    def read(self, limit: int) -> list[tuple[int, Buffer]]:
        """Returns up to ``limit`` of the next complete records as (offset, payload)."""
        size = os.fstat(self._fd).st_size
        if size <= max(self.start, len(MAGIC)):
            self._check_shrunk(size)
            return []
        if self.start == 0:
            head = os.pread(self._fd, _READ_BYTES, 0)
            filled = head.rstrip(b"\0")
            if len(filled) < len(MAGIC) and MAGIC.startswith(filled):
                return []  # the rest is space that a file system has allotted and not filled
            if head[: len(MAGIC)] != MAGIC:
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

    def skip_damage(self) -> bool:
        """Moves to the first complete frame after the damage at ``start``. Returns False if there is none."""
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as content:
            if self.start == 0:
                self.start = len(MAGIC)
                if frames.is_header(content, self.start, self.offset):
                    return True  # only the magic is damaged
            if frames.is_header(content, self.start, self.offset):
                behind = self.start + frames.frame_bytes(content, self.start)
                if behind <= len(content):  # the damage is in the payload
                    self.start, self.offset = behind, self.offset + 1
                    return True
            for offset in range(self.offset + 1, self.offset + 1 + _MAX_LOST_IN_A_ROW):
                found = frames.find(content, self.start, offset)
                if found is not None:
                    self.start, self.offset = found, offset
                    return True
        return False

    def close(self) -> None:
        os.close(self._fd)

    def _parse(self, buffer: bytes, limit: int) -> list[tuple[int, Buffer]]:
        records: list[tuple[int, Buffer]] = []
        start = 0
        while len(records) < limit:
            try:
                frame = frames.parse_frame(buffer, start, self.offset + len(records), self._max_bytes)
            except CorruptStreamError:
                if records:
                    break  # deliver the records before the damage. The next call starts at the damage and raises
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
        """Returns the length of the frame at ``start``, which is larger than one read, or 0 while it is incomplete."""
        if not any(buffer):
            raise CorruptStreamError(f"record {self.offset}: zeros where a frame should be")
        length = frames.frame_bytes(buffer)
        return length if self.start + length <= size else 0

    def _check_shrunk(self, size: int) -> None:
        if size < self.start and self.start > len(MAGIC):
            raise CorruptStreamError(f"{self._path}: shrank to {size} bytes after {self.start} had been read")


def scan(folder: Path, base: int, max_bytes: int) -> End:
    """Reads a segment to its end and records every damage on the way."""
    segment = Segment(folder, base, max_bytes)
    last: RecordPlace | None = None
    damages: list[Damage] = []
    try:
        while True:
            try:
                records = segment.read(MAX_RECORDS_PER_READ)
            except CorruptStreamError as error:
                start, first = segment.start, segment.offset
                goes_on = segment.skip_damage()
                end = segment.offset if goes_on else first + 1
                damages.append(Damage(base, start, first, end, str(error)))
                if not goes_on:
                    return End(end, None, last, tuple(damages))
                continue
            if not records:
                return End(segment.offset, segment.start, last, tuple(damages))
            last = RecordPlace(base, segment.last_start, segment.offset - 1)
    finally:
        segment.close()
