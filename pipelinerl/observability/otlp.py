"""Sends spans to an OpenTelemetry collector, through OpenTelemetry's own exporter (`tracing.otlp_endpoint`).

The exporter batches in a thread behind a bounded queue, retries, and reads the usual `OTEL_EXPORTER_OTLP_*` variables.
If the collector is away, only its spans are lost.
"""

from collections.abc import Mapping

from pipelinerl.errors import ConfigError

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags
except ImportError as error:
    raise ConfigError(
        f"tracing.otlp_endpoint needs OpenTelemetry's exporter ({error}): pip install 'pipelinerl[otlp]' or set null"
    ) from error

PATH = "/v1/traces"

AttributeValue = str | int | float | bool | None
SCOPE = "pipelinerl"


class OTLPSink:
    """Passes spans to the exporter.

    Args:
        endpoint: URL of the collector, to whose end `/v1/traces` is added unless it has it.
        resource: attributes of the process.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, AttributeValue]):
        url = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
        self._resource = Resource({key: value for key, value in resource.items() if value is not None})
        self._scope = InstrumentationScope(SCOPE)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))

    def export(
        self,
        name: str,
        ids: tuple[str, str, str],
        start: int,
        end: int,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """Pass a span on.

        Args:
            ids: hexadecimal ids of the trace, the span, and its parent (empty for a root).
            start, end: Unix time in ns.
        """
        trace_id, span_id, parent_id = ids
        self._processor.on_end(
            ReadableSpan(
                name=name,
                context=_context(trace_id, span_id),
                parent=_context(trace_id, parent_id) if parent_id else None,
                resource=self._resource,
                instrumentation_scope=self._scope,
                attributes={key: value for key, value in attributes.items() if value is not None},
                start_time=start,
                end_time=end,
            )
        )

    def close(self) -> None:
        self._processor.shutdown()


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
