"""The reader of a stream in files: its place in the segments and, if it has a name, its durable position."""

import time
from contextlib import suppress
from pathlib import Path

from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.streams.base import MAX_RECORDS_PER_READ, Cursor
from pipelinerl.streams.files.folder import (
    READER_NAME,
    agreed_end,
    clear_errors,
    read_position,
    segment_bases,
    segment_path,
)
from pipelinerl.streams.files.segment import Segment
from pipelinerl.streams.frames import Buffer
from pipelinerl.streams.spec import SingleStreamSpec
from pipelinerl.streams.wakeup import FolderWatch
from pipelinerl.world.disk import make_folder, replace_file, sync_path

_GAP_CHECK_S = 1.0
"""Time between two searches for newer segments while no record comes, which tell a missing record from a late one."""
_REREADS = 3
"""Times that a damaged record is read again, because a recovering writer may be replacing a torn frame."""
_REREAD_PAUSE_S = 0.02
"""Pause before each, longer than a writer takes to cut a frame off."""


class FilesCursor(Cursor):
    def __init__(
        self, spec: SingleStreamSpec, name: str | None, start: int | None, *, max_bytes: int, durable: bool = True
    ):
        """``durable``: sync positions, and the records below them, to disk (`fsync` is not ``never``)."""
        self._path = spec.path
        self._max_bytes = max_bytes
        self._durable = durable
        self._segment: Segment | None = None
        self._position_file: Path | None = None
        self._committed = 0
        self._synced = self._synced_base = 0
        with clear_errors("read", self._path):
            stored = None if name is None else self._stored_position(name)
            if start is None:
                start = stored
            self._watch = FolderWatch(self._path)
            try:
                bases = segment_bases(self._path)
                self.position = start if start is not None else (bases[0] if bases else 0)
                self._seek(bases)
                if name is not None and stored is None:
                    self._register()
            except BaseException:
                self.close()
                raise

    def read(self, timeout_s: float) -> list[tuple[int, Buffer]]:
        deadline = time.monotonic() + timeout_s
        next_gap_check = time.monotonic() + _GAP_CHECK_S
        with clear_errors("read", self._path):
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
            with clear_errors("commit a position to", self._position_file):
                replace_file(self._position_file, f"{offset}\n", sync=self._durable)
            self._committed = offset

    def sync(self) -> None:
        end = self.position
        if not self._durable or end <= self._synced:
            return
        with clear_errors("sync", self._path):
            for base in [base for base in segment_bases(self._path) if self._synced_base <= base < end]:
                with suppress(FileNotFoundError):  # deleted meanwhile, because every reader has passed it
                    sync_path(segment_path(self._path, base))
                self._synced_base = base
        self._synced = end

    def skip_damage(self) -> bool:
        with clear_errors("read", self._path):
            if self._segment is None or self._segment.base > self.position or not self._segment.skip_damage():
                later = [base for base in segment_bases(self._path) if base > self.position]
                if not later:
                    return False
                self._close_segment()
                self._segment = Segment(self._path, later[0], self._max_bytes)
            self.position = self._segment.offset
        return True

    def close(self) -> None:
        self._watch.close()
        self._close_segment()

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _stored_position(self, name: str) -> int | None:
        """Returns the named reader's position, or None if it has never read this stream."""
        if not READER_NAME.fullmatch(name):
            raise StreamError(f"reader name is {name!r}: use letters, digits, '_', '-' and '.'")
        self._position_file = self._path / "readers" / name
        stored = read_position(self._position_file)
        self._committed = stored or 0
        return stored

    def _register(self) -> None:
        """Makes the position of a new reader durable, so that no record from there on is deleted."""
        assert self._position_file is not None
        make_folder(self._position_file.parent, sync=self._durable)
        replace_file(self._position_file, f"{self.position}\n", sync=self._durable)
        self._committed = self.position

    def _seek(self, bases: list[int]) -> None:
        """Opens the segment that contains ``position`` and moves to that record, ignoring damage before it."""
        if bases and self.position < bases[0]:
            raise CorruptStreamError(
                f"{self._path}: record {self.position} is no longer there, the oldest is {bases[0]}: every "
                "named reader had passed it"
            )
        base = max((base for base in bases if base <= self.position), default=None)
        if base is not None:
            self._segment = Segment(self._path, base, self._max_bytes)
            self._walk(self._segment)
        end = self._segment.offset if self._segment else 0
        if end < self.position:
            self._close_segment()
            if self.position > agreed_end(self._path, end):
                raise CorruptStreamError(
                    f"{self._path}: a reader wants to begin at record {self.position}, but the stream ends before "
                    f"record {end}: its end was lost (a power cut with streams.fsync=never?) or these are another "
                    "run's streams"
                )

    def _walk(self, segment: Segment) -> None:
        while segment.offset < self.position:
            try:
                if not segment.read(min(MAX_RECORDS_PER_READ, self.position - segment.offset)):
                    return
            except CorruptStreamError:
                if not segment.skip_damage():
                    return
                if segment.offset > self.position:
                    raise

    def _available(self) -> list[tuple[int, Buffer]]:
        records = self._read_segment()
        if not records and (self._segment is None or self._segment.base != self.position):
            try:
                following = Segment(self._path, self.position, self._max_bytes)
            except FileNotFoundError:
                return []
            self._close_segment()
            self._segment = following
            records = self._read_segment()
        if self._segment is not None:
            self.position = self._segment.offset
        return records

    def _read_segment(self) -> list[tuple[int, Buffer]]:
        """Reads records and retries after a mismatch, because a recovering writer may be replacing a torn frame."""
        if self._segment is None:
            return []
        for _ in range(_REREADS):
            try:
                return self._segment.read(MAX_RECORDS_PER_READ)
            except CorruptStreamError:
                time.sleep(_REREAD_PAUSE_S)
        return self._segment.read(MAX_RECORDS_PER_READ)

    def _check_gap(self) -> list[tuple[int, Buffer]]:
        """Returns what can be read now. Raises if newer segments exist but the record at ``position`` does not."""
        later = [base for base in segment_bases(self._path) if base > self.position]
        records = self._available()
        if later and not records and self.position < later[0]:
            raise CorruptStreamError(f"{self._path}: records {self.position} to {later[0] - 1} are missing")
        return records
