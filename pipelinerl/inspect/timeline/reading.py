"""Reads the spans of a run folder, which may still be written."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.observability.spans import TRACES, SpanBatch


@dataclass(frozen=True, kw_only=True)
class TimelineSpan:
    """A span of one process."""

    process: str
    name: str
    trace: str
    """Name of its trace, e.g. a sample's id."""
    start: float
    """Seconds since the beginning of the run."""
    end: float
    attributes: dict[str, Any] = field(default_factory=dict)


def read_spans(run_dir: Path) -> list[TimelineSpan]:
    """Read all spans of a run, by start. Raises ``ConfigError`` if there are none."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a run folder: there is no such folder")
    found = [(process_of(path), span) for path in files_of(run_dir) for batch in in_file(path) for span in batch.spans]
    if not found:
        raise ConfigError(
            f"{run_dir} has no spans in {TRACES}/: they are written while a run goes on, unless tracing.trace_mb=0"
        )
    origin = min(span.start for _, span in found)
    spans = [
        TimelineSpan(
            process=process,
            name=span.name,
            trace=span.trace,
            start=(span.start - origin) / 1e9,
            end=(span.end - origin) / 1e9,
            attributes=span.attributes,
        )
        for process, span in found
    ]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def files_of(run_dir: Path) -> list[Path]:
    return sorted((run_dir / TRACES).glob("*.jsonl"))


def process_of(path: Path) -> str:
    """`actor_0.worker1.1.jsonl` → `actor_0.worker1`. A name's own last part is no number alone."""
    stem = path.name.removesuffix(".jsonl")
    return stem.removesuffix(".1")


def in_file(path: Path) -> Iterator[SpanBatch]:
    """The batches of a file. A line that is still being written, or was cut, is left out."""
    decoder = msgspec.json.Decoder(SpanBatch)
    with open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield decoder.decode(line)


def between(spans: Iterable[TimelineSpan], start: float, end: float) -> list[TimelineSpan]:
    """The spans that touch these seconds."""
    return [span for span in spans if span.end >= start and span.start <= end]
