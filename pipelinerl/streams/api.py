"""The streams API for roles and users: typed topics on the backend that the process has set.

A role calls ``backend_from_config`` once, then ``open_writer`` and ``open_reader``. User code calls
``set_streams_backend``, ``write_to_streams`` and ``read_stream``, whose records are plain data.
"""

import logging
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from pipelinerl.config.backends import STREAM_BACKENDS
from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, CorruptStreamError, RecordTooLarge, StreamError
from pipelinerl.records.topics import RETAINED_MB
from pipelinerl.streams.base import RETENTION, Appender, Backend, Cursor
from pipelinerl.streams.codec import Codec
from pipelinerl.streams.spec import SingleStreamSpec, StreamRangeSpec, StreamSpec

R = TypeVar("R")
log = logging.getLogger(__name__)

RETENTION_SLICES = 8
"""Marks in the bytes that are kept. Up to one slice more is kept."""
_BLOCK_S = 1.0
"""Longest wait in one call, so that signals are handled meanwhile."""
_backend: Backend | None = None


class _Closing:
    """Context manager that calls ``close`` at the end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()


class TopicWriter(_Closing, Generic[R]):
    """Appends records of one type to one stream. A stream has only one writer."""

    def __init__(
        self,
        spec: SingleStreamSpec,
        appender: Appender,
        codec: Codec[R],
        max_record_bytes: int,
        retention: "Retention | None" = None,
    ):
        self.spec = spec
        self._appender = appender
        self._codec = codec
        self._max_record_bytes = max_record_bytes
        self._retention = retention

    @property
    def next_offset(self) -> int:
        """Offset of the next record to be written."""
        return self._appender.next_offset

    def write(self, record: R) -> int:
        """Appends ``record`` and returns its offset.

        Raises:
            RecordTooLarge: the record exceeds ``streams.max_record_mb``. Nothing was written.
            StreamError: the record could not be written.
        """
        payload = self._codec.encode(record)
        if len(payload) > self._max_record_bytes:
            raise RecordTooLarge(
                f"{self.spec}: record {self.next_offset} has {len(payload)} bytes, but streams.max_record_mb is "
                f"{self._max_record_bytes >> 20}: raise it or write smaller records"
            )
        offset = self._appender.append(payload)
        if self._retention is not None:
            self._retention.appended(offset, len(payload))
        return offset

    def sync(self) -> None:
        """Makes every record written so far durable, so that state outside the streams may refer to their offsets."""
        self._appender.sync()

    def barrier(self) -> None:
        """Orders durability: later writes to any stream become durable only after the records written here so far."""
        self._appender.barrier()

    def last(self) -> tuple[int, R] | None:
        """Returns offset and content of the newest record, to continue after a restart. None if there is no record."""
        payload = self._appender.last()
        return None if payload is None else (self.next_offset - 1, self._codec.decode(payload))

    def close(self) -> None:
        """Releases the stream. May be called more than once."""
        self._appender.close()
        if self._retention is not None:
            self._retention.close()


class Retention(_Closing):
    """Bounds a topic without named readers: releases records once ``keep_bytes`` of newer records exist.

    It marks an offset after every eighth of ``keep_bytes`` and commits the oldest mark on the cursor of the topic's
    own writer. The marks are lost in a restart, so up to twice ``keep_bytes`` may be kept.
    """

    def __init__(self, appender: Appender, cursor: Cursor, keep_bytes: int):
        self._appender, self._cursor, self._slice_bytes = appender, cursor, keep_bytes // RETENTION_SLICES
        self._marks: deque[int] = deque(maxlen=RETENTION_SLICES + 1)
        self._since_mark = 0

    def appended(self, offset: int, num_bytes: int) -> None:
        """Counts the record written at ``offset``, of ``num_bytes`` bytes."""
        self._since_mark += num_bytes
        if self._since_mark >= self._slice_bytes:
            self._since_mark = 0
            self._marks.append(offset + 1)
            if len(self._marks) == self._marks.maxlen:
                self._appender.barrier()
                self._cursor.commit(self._marks[0])

    def close(self) -> None:
        self._cursor.close()


class TopicReader(_Closing, Generic[R]):
    """Reads records of one type from one stream and checks each record against the type."""

    def __init__(self, spec: SingleStreamSpec, cursor: Cursor, codec: Codec[R], *, over_damage: bool = False):
        self.spec = spec
        self._cursor = cursor
        self._codec = codec
        self._over_damage = over_damage

    @property
    def position(self) -> int:
        """Offset of the next record."""
        return self._cursor.position

    def poll(self, timeout_s: float) -> list[tuple[int, R]]:
        """Returns the next records (at most a few hundred) with offsets. Waits up to ``timeout_s`` for the first."""
        return [(offset, self._decode(offset, payload)) for offset, payload in self._read(timeout_s)]

    def _read(self, timeout_s: float) -> list[tuple[int, Any]]:
        while True:
            try:
                return self._cursor.read(timeout_s)
            except CorruptStreamError as error:
                if not self._over_damage:
                    raise
                if not self._cursor.skip_damage():
                    time.sleep(min(timeout_s, _BLOCK_S))
                    return []  # no whole record follows the damage yet
                log.warning("event=damage_passed_over stream=%s reason=%s", self.spec, error)

    def read_all(self) -> list[tuple[int, R]]:
        """Returns every record from ``position`` on that exists now, without waiting."""
        return list(self.read_each())

    def read_each(self) -> Iterator[tuple[int, R]]:
        """Yields what ``read_all`` returns, and holds one batch at a time."""
        while found := self.poll(0):
            yield from found

    def commit(self, offset: int) -> None:
        """Makes ``offset`` the durable position. Records below it may be deleted, as this reader never needs them."""
        self._cursor.commit(offset)

    def barrier(self) -> None:
        """Orders durability: later writes to any stream become durable only after the records read here so far."""
        self._cursor.barrier()

    def sync(self) -> None:
        """Makes the records below ``position`` durable, so that other state may refer to it. Any thread may call it."""
        self._cursor.sync()

    def close(self) -> None:
        """Ends reading and keeps the durable position."""
        self._cursor.close()

    def _decode(self, offset: int, payload: Any) -> R:
        try:
            return self._codec.decode(payload)
        except StreamError as error:
            raise type(error)(f"{self.spec}, record {offset}: {error}") from error


class StreamWriter(_Closing):
    """Writes plain data to the partitions of a topic, round-robin or to a chosen partition."""

    def __init__(self, writers: list[TopicWriter[Any]]):
        self._writers = writers
        self._turn = 0

    def write(self, data: Any, partition: int | None = None) -> None:
        """Appends ``data`` (dicts, lists, numbers, strings, arrays, pydantic models).

        Args:
            partition: index within the spec's partitions. None = the next one in turn.
        """
        if partition is None:
            partition, self._turn = self._turn, (self._turn + 1) % len(self._writers)
        if not 0 <= partition < len(self._writers):
            raise ConfigError(f"partition is {partition}: it must be 0 to {len(self._writers) - 1}")
        self._writers[partition].write(data)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class StreamReader(_Closing):
    """Reads plain data from one stream."""

    def __init__(self, reader: TopicReader[Any]):
        self._reader = reader

    def read(self) -> Iterator[Any]:
        """Yields every record from the beginning, then each new record when it arrives. Never ends by itself."""
        while True:
            for _, record in self._reader.poll(_BLOCK_S):
                yield record

    def close(self) -> None:
        self._reader.close()


def set_streams_backend(backend: str | Backend, **options: Any) -> None:
    """Sets the streams backend of this process. Streams that are already open keep their backend.

    Args:
        backend: ``files`` (in the run folder), ``redis`` (a server), the dotted path of another ``Backend`` class, or
            a ``Backend`` instance.
        options: arguments of the class. ``files`` takes segment_mb, fsync and max_record_mb. ``redis`` takes host,
            port, password, run_id, max_record_mb and outage_timeout_s.
    """
    global _backend
    _backend = backend if isinstance(backend, Backend) else _made(backend, lambda: backend_class(backend)(**options))


def _made(name: str, make: Callable[[], Backend]) -> Backend:
    try:
        return make()
    except TypeError as error:
        raise ConfigError(f"streams backend {name!r} does not take these options: {error}") from error


def backend_class(name: str) -> type[Backend]:
    """Returns the backend class for a name in ``STREAM_BACKENDS`` or for the dotted path of a class."""
    if name not in STREAM_BACKENDS and "." not in name:
        known = ", ".join(STREAM_BACKENDS)
        raise ConfigError(f"streams backend is {name!r}: use {known} or the dotted path of a class")
    found = resolve_function(STREAM_BACKENDS.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(f"streams backend is {name!r}: it is not a class derived from {Backend.__module__}.Backend")
    return found


def get_streams_backend() -> Backend:
    """Returns the backend of this process. Raises ``StreamError`` if none is set."""
    if _backend is None:
        raise StreamError("no streams backend is set: call set_streams_backend('files') or ('redis', host=…, …) first")
    return _backend


def backend_from_config(cfg: Config, run_dir: str | Path) -> None:
    """Sets the backend that the configuration of the run in ``run_dir`` names."""
    set_streams_backend(make_backend(cfg, run_dir))


def make_backend(cfg: Config, run_dir: str | Path) -> Backend:
    """Returns the backend that the configuration of the run in ``run_dir`` names. Opens no stream."""
    name = cfg.streams.backend
    return _made(name, lambda: backend_class(name).from_config(cfg, Path(run_dir)))


def open_writer(spec: SingleStreamSpec, record_type: Any) -> TopicWriter[Any]:
    """Opens the only writer of ``spec`` and removes an incomplete record that a killed writer left.

    Args:
        record_type: a Struct, or a union of tagged Structs. The writer refuses other records.
    """
    backend = get_streams_backend()
    codec: Codec[Any] = Codec(record_type)
    appender = backend.open_appender(spec)
    keep_mb = RETAINED_MB.get(spec.topic)
    if keep_mb is None:
        return TopicWriter(spec, appender, codec, backend.max_record_bytes)
    try:
        retention = Retention(appender, backend.open_cursor(spec, RETENTION, None), keep_mb << 20)
    except BaseException:
        appender.close()
        raise
    return TopicWriter(spec, appender, codec, backend.max_record_bytes, retention)


def open_reader(
    spec: SingleStreamSpec,
    record_type: Any,
    *,
    name: str | None,
    start: int | None = None,
    over_damage: bool = False,
) -> TopicReader[Any]:
    """Opens a reader of ``spec``. The stream need not exist yet.

    Args:
        record_type: expected type of the records.
        name: name of the durable position. Records are kept until every named reader has committed beyond them, so
            open named readers when the run begins. None: no durable position, and no record is kept for this reader.
        start: first offset to read. None = the durable position, else the oldest record.
        over_damage: skip damaged or missing records with a warning instead of raising ``CorruptStreamError``. Meant
            for topics whose older records do not matter.
    """
    cursor = get_streams_backend().open_cursor(spec, name, start)
    return TopicReader(spec, cursor, Codec(record_type), over_damage=over_damage)


def write_to_streams(streams: StreamSpec, mode: Literal["w", "a"] = "a") -> StreamWriter:
    """Opens one or several partitions for plain data.

    Args:
        mode: ``a`` appends after the last record, ``w`` deletes existing records first.
    """
    if not isinstance(streams, SingleStreamSpec | StreamRangeSpec):
        raise ConfigError(f"{streams!r} is not a stream: give a SingleStreamSpec or a StreamRangeSpec")
    if mode not in ("w", "a"):
        raise ConfigError(f"mode is {mode!r}: it must be 'a' (append) or 'w' (delete existing records first)")
    specs = [streams] if isinstance(streams, SingleStreamSpec) else list(streams)
    writers: list[TopicWriter[Any]] = []
    try:
        for spec in specs:
            if mode == "w":
                get_streams_backend().delete(spec)
            writers.append(open_writer(spec, Any))
    except BaseException:
        for writer in writers:
            writer.close()
        raise
    return StreamWriter(writers)


def read_stream(stream: SingleStreamSpec) -> StreamReader:
    """Opens one stream for reading from its beginning as plain data. Typed records appear as dicts."""
    if not isinstance(stream, SingleStreamSpec):
        raise ConfigError(f"{stream!r} cannot be read: give a SingleStreamSpec")
    return StreamReader(open_reader(stream, Any, name=None))
