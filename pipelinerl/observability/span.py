"""A finished span: how it is recorded, its ids in OpenTelemetry's model, and its form in OTLP/JSON. Pure.

A process writes batches of records. The ids and OTLP's form are computed from them where spans leave the run: for a
collector, and in ``pipelinerl timeline --otlp``.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

SCOPE = "pipelinerl"

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
    """The span's ids. ``run``: the run's key.

    Trace and root follow from the trace's name, so every process computes the same. Another span's id follows from
    the process and the whole record.
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


def otlp_request(batch: SpanBatch) -> dict[str, Any]:
    """A batch as a request of OTLP/JSON: a line as OpenTelemetry's collector reads it."""
    spans = [_otlp_span(span, ids) for span, ids in with_ids(batch)]
    scope = {"scope": {"name": SCOPE}, "spans": spans}
    return {"resourceSpans": [{"resource": {"attributes": _otlp_attributes(batch.resource)}, "scopeSpans": [scope]}]}


def _otlp_span(span: SpanRecord, ids: SpanIds) -> dict[str, Any]:
    """A span as OTLP/JSON has it, where 64-bit integers are strings."""
    return {
        "traceId": ids.trace_id,
        "spanId": ids.span_id,
        "parentSpanId": ids.parent_id,
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": _otlp_attributes(span.attributes),
    }


def _otlp_attributes(values: Mapping[str, AttributeValue]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _typed(value)} for key, value in values.items() if value is not None]


def _typed(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
