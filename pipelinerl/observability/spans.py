"""Spans: what a process did from when to when, in which trace.

    spans.record("step", "step 7", started, root=True, tokens=4096)

``record`` only appends to a queue. A thread writes the spans to `traces/<process>.jsonl` of the run folder, each line
a ``SpanBatch``. With `tracing.otlp_endpoint` a collector gets the spans too. Every process computes the same ids from
a trace's name, so the sample's id is the trace context of a rollout: its worker writes the root span.
"""

import atexit
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pipelinerl.config.sections import Config

if TYPE_CHECKING:
    from pipelinerl.observability.otlp import OTLPSink

log = logging.getLogger(__name__)

TRACES = "traces"
"""Folder in the run folder."""
FLUSH_S = 0.5
"""Spans of this time are lost if the process is killed."""
QUEUE_SPANS = 1 << 16
"""Longest queue of the thread, some tens of MB. Beyond it the oldest spans are lost and counted."""

AttributeValue = str | int | float | bool | None


class SpanRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished span."""

    name: str
    trace: str
    """Name of its trace."""
    start: int
    """Unix time in ns."""
    end: int
    is_root: bool
    """Whether it is the trace's root. Others are its children."""
    attributes: dict[str, AttributeValue]


class SpanBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of one process: a line of its file."""

    run: str
    """The run's key, hexadecimal."""
    resource: dict[str, AttributeValue]
    """Attributes of the process."""
    spans: tuple[SpanRecord, ...]


class SpanIds(NamedTuple):
    trace_id: str
    """32 hex digits"""
    span_id: str
    """16 hex digits"""
    parent_id: str
    """16 hex digits, or empty for a root."""


def span_ids(run: bytes, process: str, span: SpanRecord) -> SpanIds:
    """The span's ids: trace and root from the trace's name, another span's from the process and the whole record.

    Args:
        run: the run's key.
    """
    digits = hashlib.blake2b(span.trace.encode(), digest_size=24, key=run).hexdigest()
    trace_id, root_id = digits[:32], digits[32:]
    if span.is_root:
        return SpanIds(trace_id, root_id, "")
    content = msgspec.json.encode((process, span))
    return SpanIds(trace_id, hashlib.blake2b(content, digest_size=8, key=run).hexdigest(), root_id)


def with_ids(batch: SpanBatch) -> Iterator[tuple[SpanRecord, SpanIds]]:
    """The spans of a batch with their ids."""
    run, process = bytes.fromhex(batch.run), str(batch.resource.get("service.name"))
    for span in batch.spans:
        yield span, span_ids(run, process, span)


def run_key_of(cfg: Config) -> bytes:
    """A key that all processes of a run share, and other runs do not."""
    return hashlib.blake2b(cfg.output_dir.encode(), digest_size=16).digest()


class SpanWriter:
    """Writes one process's spans in a thread.

    Args:
        path: the file. With half of ``max_bytes`` it becomes ``<name>.1.jsonl`` and a new one begins.
        run: the run's key.
        resource: attributes of the process.
        sink: takes the spans too.
    """

    def __init__(
        self,
        path: Path,
        run: bytes,
        resource: Mapping[str, AttributeValue],
        max_bytes: int,
        sink: "OTLPSink | None" = None,
    ):
        self._path, self._max_bytes, self._sink = path, max_bytes, sink
        self._empty = SpanBatch(run=run.hex(), resource=dict(resource), spans=())
        self._queue: deque[SpanRecord] = deque(maxlen=QUEUE_SPANS)
        self._lost, self._closed = 0, threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, span: SpanRecord) -> None:
        if len(self._queue) == QUEUE_SPANS:
            self._lost += 1
        self._queue.append(span)
        if self._thread is None:
            self._start_thread()

    def close(self) -> None:
        """Write the queue and end the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._sink is not None:
            self._sink.close()
        if self._lost:
            log.warning("event=spans_lost count=%d", self._lost)

    def _start_thread(self) -> None:
        """Start the thread at the first span: processes without spans may fork."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run_thread, name="spans", daemon=True)
                thread.start()
                self._thread = thread

    def _run_thread(self) -> None:
        warned = False
        while True:
            ending = self._closed.wait(FLUSH_S)
            try:
                self._flush()
            except OSError as error:  # a full disk costs spans, never a step
                if not warned:
                    log.warning("event=spans_lost file=%s error=%s", self._path, error)
                warned = True
            if ending:
                return

    def _flush(self) -> None:
        waiting = [self._queue.popleft() for _ in range(len(self._queue))]
        if not waiting:
            return
        batch = msgspec.structs.replace(self._empty, spans=tuple(waiting))
        if self._sink is not None:
            for span, ids in with_ids(batch):
                self._sink.export(span.name, ids, span.start, span.end, span.attributes)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
            file.write(msgspec.json.encode(batch) + b"\n")
        if self._path.stat().st_size > self._max_bytes // 2:
            os.replace(self._path, earlier_spans(self._path))


def earlier_spans(path: Path) -> Path:
    """Path of the older part of a file of spans."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


_writer: SpanWriter | None = None


def start_recording(cfg: Config, run_dir: Path, process: str) -> None:
    """Record the spans of this process, named ``process``, if `tracing.trace_mb` is not 0."""
    if _writer is not None or not cfg.tracing.trace_mb:
        return
    resource: dict[str, AttributeValue] = {
        "service.name": process,
        "service.namespace": str(cfg.output_dir),
        "process.pid": os.getpid(),
    }
    sink: OTLPSink | None = None
    if cfg.tracing.otlp_endpoint is not None:
        from pipelinerl.observability import otlp  # an extra

        sink = otlp.OTLPSink(cfg.tracing.otlp_endpoint, resource)
    path = run_dir / TRACES / f"{process}.jsonl"
    install(SpanWriter(path, run_key_of(cfg), resource, cfg.tracing.trace_mb << 20, sink))
    atexit.register(stop)


def install(writer: SpanWriter) -> None:
    """Record this process's spans with ``writer``, which ``stop`` closes."""
    global _writer
    _writer = writer


def stop() -> None:
    """Write the queue and stop recording."""
    global _writer
    writer, _writer = _writer, None
    if writer is not None:
        writer.close()


def record(
    name: str, trace: str, start: int, end: int | None = None, *, root: bool = False, **attributes: AttributeValue
) -> None:
    """Record a span that has ended.

    Args:
        trace: name of its trace.
        start, end: Unix time in ns (`time.time_ns`). None: now.
        root: whether it is the trace's root.
    """
    if _writer is not None:
        _writer.put(SpanRecord(name, trace, start, time.time_ns() if end is None else end, root, attributes))
