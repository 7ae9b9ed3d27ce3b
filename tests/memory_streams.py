"""Streams inside one process, the same contract and the same bytes as on disk, no files."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl.errors import StreamError
from pipelinerl.streams.base import MAX_RECORDS_PER_READ, Appender, Backend, Cursor, StreamStats
from pipelinerl.streams.frames import Buffer
from pipelinerl.streams.spec import SingleStreamSpec


@dataclass
class _Log:
    """One stream; ``changed`` guards every field."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    first_offset: int = 0
    payloads: list[bytes] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    has_writer: bool = False

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.payloads)


class MemoryBackend(Backend):
    def __init__(self) -> None:
        self._logs: dict[SingleStreamSpec, _Log] = {}
        self._lock = threading.Lock()

    def open_appender(self, spec: SingleStreamSpec) -> Appender:
        return MemoryAppender(spec, self._log(spec))

    def open_cursor(self, spec: SingleStreamSpec, name: str | None, start: int | None) -> Cursor:
        return MemoryCursor(spec, self._log(spec), name, start)

    def specs(self, exp_path: Path) -> list[SingleStreamSpec]:
        with self._lock:
            found = [spec for spec in self._logs if spec.exp_path == Path(exp_path)]
        return sorted(found, key=lambda spec: (spec.topic, spec.instance, spec.partition))

    def stats(self, spec: SingleStreamSpec) -> StreamStats:
        stored = self._log(spec)
        with stored.changed:
            return StreamStats(
                spec=spec,
                first_offset=stored.first_offset,
                next_offset=stored.next_offset,
                size_bytes=sum(map(len, stored.payloads)),
                positions=dict(stored.positions),
            )

    def delete(self, spec: SingleStreamSpec) -> None:
        with self._lock:
            self._logs.pop(spec, None)

    def _log(self, spec: SingleStreamSpec) -> _Log:
        with self._lock:
            return self._logs.setdefault(spec, _Log())


class MemoryAppender(Appender):
    def __init__(self, spec: SingleStreamSpec, stored: _Log):
        self._spec = spec
        self._log = stored
        self._open = True
        with stored.changed:
            if stored.has_writer:
                raise StreamError(f"{spec} is being written by this process: a stream has one writer")
            stored.has_writer = True
            self.next_offset = stored.next_offset

    def append(self, payload: bytes) -> int:
        if not self._open:
            raise StreamError(f"{self._spec}: the writer is closed")
        with self._log.changed:
            self._log.payloads.append(payload)
            self.next_offset = self._log.next_offset
            self._log.changed.notify_all()
        return self.next_offset - 1

    def last(self) -> bytes | None:
        return self._log.payloads[-1] if self._log.payloads else None

    def close(self) -> None:
        if self._open:
            self._open = False
            with self._log.changed:
                self._log.has_writer = False


class MemoryCursor(Cursor):
    def __init__(self, spec: SingleStreamSpec, stored: _Log, name: str | None, start: int | None):
        self._spec = spec
        self._log = stored
        self._name = name
        with stored.changed:
            if start is None:
                start = stored.positions.get(name or "", stored.first_offset)
            if not stored.first_offset <= start <= stored.next_offset:
                raise StreamError(
                    f"{spec}: a reader wants to begin at record {start}, but the stream holds records "
                    f"{stored.first_offset} to {stored.next_offset - 1}"
                )
            if name is not None:
                stored.positions.setdefault(name, start)
        self.position = start

    def read(self, timeout_s: float) -> list[tuple[int, Buffer]]:
        deadline = time.monotonic() + timeout_s
        with self._log.changed:
            while self.position >= self._log.next_offset:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return []
                self._log.changed.wait(remaining)
            first = self.position - self._log.first_offset
            if first < 0:
                raise StreamError(f"{self._spec}: record {self.position} is no longer there")
            records: list[tuple[int, Buffer]] = list(
                enumerate(self._log.payloads[first : first + MAX_RECORDS_PER_READ], start=self.position)
            )
        self.position += len(records)
        return records

    def commit(self, offset: int) -> None:
        if self._name is None:
            raise StreamError(f"{self._spec}: a reader without a name has no durable position to commit")
        with self._log.changed:
            positions = self._log.positions
            positions[self._name] = max(positions.get(self._name, 0), offset)
            surplus = min(*positions.values(), self._log.next_offset - 1) - self._log.first_offset
            if surplus > 0:
                del self._log.payloads[:surplus]
                self._log.first_offset += surplus

    def close(self) -> None:
        pass
