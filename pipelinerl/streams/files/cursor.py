"""A reader of a stream in files: its place in the segments, and its durable position if it has a name."""

import time
from contextlib import suppress
from pathlib import Path

from pipelinerl.disk import replace_file, sync_path
from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.streams.base import MAX_RECORDS_PER_READ, Cursor
from pipelinerl.streams.files.folder import READER_NAME, clear_errors, read_position, segment_bases, segment_path
from pipelinerl.streams.files.segment import Segment
from pipelinerl.streams.frames import Buffer
from pipelinerl.streams.spec import SingleStreamSpec
from pipelinerl.streams.wakeup import FolderWatch

_GAP_CHECK_S = 1.0
_REREADS = 3
_REREAD_PAUSE_S = 0.02


class FilesCursor(Cursor):
    def __init__(self, spec: SingleStreamSpec, name: str | None, start: int | None, *, max_bytes: int):
        self._path = spec.path
        self._max_bytes = max_bytes
        self._segment: Segment | None = None
        self._position_file: Path | None = None
        self._committed = 0
        self._synced = 0
        with clear_errors("read", self._path):
            durable = None if name is None else self._durable_position(name)
            if start is None:
                start = durable
            self._watch = FolderWatch(self._path)
            try:
                bases = segment_bases(self._path)
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
                replace_file(self._position_file, f"{offset}\n", sync=True)
            self._committed = offset

    def sync(self) -> None:
        end = self.position
        with clear_errors("sync", self._path):
            for base in [base for base in segment_bases(self._path) if self._synced <= base < end]:
                with suppress(FileNotFoundError):
                    sync_path(segment_path(self._path, base))
                self._synced = base
            for folder in (self._path, *self._path.parents[:3]):
                sync_path(folder)

    def close(self) -> None:
        self._watch.close()
        self._close_segment()

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _durable_position(self, name: str) -> int | None:
        """The named reader's position, or None when it never read this stream."""
        if not READER_NAME.fullmatch(name):
            raise StreamError(f"reader name is {name!r}: use letters, digits, '_', '-' and '.'")
        self._position_file = self._path / "readers" / name
        durable = read_position(self._position_file)
        self._committed = durable or 0
        return durable

    def _register(self) -> None:
        """Makes the position of a new reader durable, so that nothing behind it is deleted from now on."""
        assert self._position_file is not None
        self._position_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._position_file, f"{self.position}\n", sync=True)
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
            self._segment = Segment(self._path, base, self._max_bytes)
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
        later = [base for base in segment_bases(self._path) if base > self.position]
        records = self._available()
        if later and not records and self.position < later[0]:
            raise CorruptStreamError(f"{self._path}: records {self.position} to {later[0] - 1} are missing")
        return records
