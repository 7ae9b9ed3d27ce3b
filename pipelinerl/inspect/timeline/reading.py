"""Reads the spans of a run folder, which may still be written."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.observability.spans import TRACES


@dataclass(frozen=True, kw_only=True)
class TimelineSpan:
    """A span of one process."""

    process: str
    name: str
    trace_id: str
    start: float
    """Seconds since the beginning of the run."""
    end: float
    attributes: dict[str, Any] = field(default_factory=dict)


class _Value(msgspec.Struct):
    stringValue: str | None = None
    intValue: str | None = None
    doubleValue: float | None = None
    boolValue: bool | None = None

    @property
    def value(self) -> Any:
        if self.intValue is not None:
            return int(self.intValue)
        found = (self.stringValue, self.doubleValue, self.boolValue)
        return next((value for value in found if value is not None), None)


class _Attribute(msgspec.Struct):
    key: str
    value: _Value


class _Span(msgspec.Struct):
    traceId: str
    name: str
    startTimeUnixNano: str
    endTimeUnixNano: str
    attributes: tuple[_Attribute, ...] = ()


class _Scope(msgspec.Struct):
    spans: tuple[_Span, ...]


class _Resource(msgspec.Struct):
    scopeSpans: tuple[_Scope, ...]


class _Line(msgspec.Struct):
    resourceSpans: tuple[_Resource, ...]


def read_spans(run_dir: Path) -> list[TimelineSpan]:
    """Read all spans of a run, by start.

    Raises:
        ConfigError: there are none.
    """
    found = [(process_of(path), span) for path in sorted((run_dir / TRACES).glob("*.jsonl")) for span in _in_file(path)]
    if not found:
        raise ConfigError(
            f"{run_dir} has no spans in {TRACES}/: they are written while a run goes on, unless tracing.trace_mb=0"
        )
    origin = min(int(span.startTimeUnixNano) for _, span in found)

    def seconds(time: str) -> float:
        return (int(time) - origin) / 1e9

    spans = [
        TimelineSpan(
            process=process,
            name=span.name,
            trace_id=span.traceId,
            start=seconds(span.startTimeUnixNano),
            end=seconds(span.endTimeUnixNano),
            attributes={attribute.key: attribute.value.value for attribute in span.attributes},
        )
        for process, span in found
    ]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def process_of(path: Path) -> str:
    """`actor_0.worker1.1.jsonl` → `actor_0.worker1`. A name's own last part is no number alone."""
    stem = path.name.removesuffix(".jsonl")
    return stem.removesuffix(".1")


def _in_file(path: Path) -> Iterator[_Span]:
    """The spans of a file, without a last line that is still being written."""
    decoder = msgspec.json.Decoder(_Line)
    with open(path, "rb") as file:
        for line in file:
            try:
                request = decoder.decode(line)
            except msgspec.DecodeError:
                continue
            for resource in request.resourceSpans:
                for scope in resource.scopeSpans:
                    yield from scope.spans


def between(spans: Iterable[TimelineSpan], start: float, end: float) -> list[TimelineSpan]:
    """The spans that touch these seconds."""
    return [span for span in spans if span.end >= start and span.start <= end]
