"""A finished span in OpenTelemetry's model, its ids, and its form in OTLP/JSON. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

SCOPE = "pipelinerl"

AttributeValue = str | int | float | bool


class SpanRecord(NamedTuple):
    """A finished span."""

    name: str
    trace: str
    """Name of its trace."""
    start: int
    """Unix time in ns."""
    end: int
    is_root: bool
    """Whether it is the trace's root. Others are its children."""
    attributes: Mapping[str, AttributeValue]


class SpanIds(NamedTuple):
    trace_id: str
    """32 hex digits"""
    span_id: str
    """16 hex digits"""
    parent_id: str
    """16 hex digits, or empty for a root."""


def trace_ids(run: bytes, trace: str) -> tuple[str, str]:
    """(trace id, span id of its root) of the trace with this name in a run. ``run``: the run's key."""
    digits = hashlib.blake2b(trace.encode(), digest_size=24, key=run).hexdigest()
    return digits[:32], digits[32:]


def as_otlp(span: SpanRecord, ids: SpanIds) -> dict[str, Any]:
    """A span as OTLP/JSON has it, where 64-bit integers are strings."""
    return {
        "traceId": ids.trace_id,
        "spanId": ids.span_id,
        "parentSpanId": ids.parent_id,
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": otlp_attributes(span.attributes),
    }


def otlp_attributes(values: Mapping[str, AttributeValue]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _typed(value)} for key, value in values.items()]


def _typed(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}
