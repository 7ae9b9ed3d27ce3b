"""Spans of processes: ids that every process computes alike, files that are bounded, a collector that gets the same."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.inspect.timeline.reading import in_file, otlp_lines
from pipelinerl.observability import spans
from pipelinerl.observability.span import SpanRecord, otlp_request, span_ids
from pipelinerl.observability.spans import SpanWriter

RUN = b"run"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    spans.stop()


def make_writer(path: Path, max_bytes: int = 1 << 20, sink: Any = None) -> SpanWriter:
    return SpanWriter(path, RUN, {"service.name": "actor_0", "process.pid": 7}, max_bytes, sink)


def read(path: Path) -> list[dict[str, Any]]:
    """The spans of a file as OpenTelemetry's collector gets them."""
    requests = [json.loads(json.dumps(otlp_request(batch))) for batch in in_file(path)]
    return [span for request in requests for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]]


def test_processes_of_a_run_write_into_one_trace_without_talking(tmp_path: Path) -> None:
    for name, root in (("rollout", True), ("preprocess", False), ("train", False)):
        writer = make_writer(tmp_path / f"{name}.jsonl")
        spans.install(writer)
        spans.record(name, "0-17/3", time.time_ns(), root=root)
        spans.stop()
    found = {name: read(tmp_path / f"{name}.jsonl")[0] for name in ("rollout", "preprocess", "train")}

    assert len({span["traceId"] for span in found.values()}) == 1
    assert len({span["spanId"] for span in found.values()}) == 3
    assert found["rollout"]["parentSpanId"] == ""
    assert {found[name]["parentSpanId"] for name in ("preprocess", "train")} == {found["rollout"]["spanId"]}


def test_traces_differ_by_name_and_run() -> None:
    names = [SpanRecord("rollout", name, 1, 2, True, {}) for name in ("0-1/0", "0-1/1")]
    ids = {span_ids(run, "actor_0", span) for run in (b"a", b"b") for span in names}
    assert len({found.trace_id for found in ids}) == len({found.span_id for found in ids}) == 4
    assert all((len(found.trace_id), len(found.span_id), found.parent_id) == (32, 16, "") for found in ids)


def test_children_of_a_trace_have_ids_of_their_own() -> None:
    calls = [SpanRecord("llm call", "0-1/0", start, 9, False, {"tokens": 3}) for start in (1, 2)]
    ids = [span_ids(RUN, process, call) for call in calls for process in ("a", "b")]
    assert len({found.span_id for found in ids}) == 4
    assert {found.parent_id for found in ids} == {span_ids(RUN, "x", SpanRecord("", "0-1/0", 0, 0, True, {})).span_id}


def test_a_line_becomes_a_request_of_otlp(tmp_path: Path) -> None:
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans.install(make_writer(tmp_path / "traces" / "actor_0.jsonl"))
    spans.record("step", "step 7", 1_000, 5_000, root=True, tokens=3, loss=0.5, kind="a", done=True)
    spans.record("rollout", "0-1/0", 2_000, 3_000, reward=float("nan"))  # JSON has no such number: left out
    spans.stop()

    (request,) = (json.loads(line) for line in otlp_lines(tmp_path))
    ParseDict(request, ExportTraceServiceRequest())  # raises what OpenTelemetry does not know
    (resource,) = request["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "actor_0"}} in resource["resource"]["attributes"]
    assert resource["scopeSpans"][0]["scope"] == {"name": "pipelinerl"}
    span, rollout = resource["scopeSpans"][0]["spans"]
    assert (span["name"], span["startTimeUnixNano"], span["endTimeUnixNano"]) == ("step", "1000", "5000")
    assert span["parentSpanId"] == ""
    assert span["attributes"] == [
        {"key": "tokens", "value": {"intValue": "3"}},
        {"key": "loss", "value": {"doubleValue": 0.5}},
        {"key": "kind", "value": {"stringValue": "a"}},
        {"key": "done", "value": {"boolValue": True}},
    ]
    assert rollout["attributes"] == []


def test_file_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    path, bound = tmp_path / "actor_0.jsonl", 5_000
    for part in range(20):
        spans.install(make_writer(path, bound))  # each writes its part in one flush
        for number in range(10):
            spans.record("rollout", f"{part}-{number}/0", part * 10 + number, root=True)
        spans.stop()
    files = [path.with_name("actor_0.1.jsonl"), path]
    assert sum(file.stat().st_size for file in files if file.exists()) <= bound + 10 * 60 + 100
    starts = [int(span["startTimeUnixNano"]) for file in files if file.exists() for span in read(file)]
    assert starts == list(range(starts[0], 200))
    assert len(starts) >= 30


def test_a_full_disk_costs_spans_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("a file stands where the folder must be")
    spans.install(make_writer(tmp_path / "folder" / "actor_0.jsonl"))
    spans.record("rollout", "0-0/0", 1)
    spans.stop()
    assert "event=spans_lost" in caplog.text


def test_without_a_writer_or_with_no_space_nothing_is_recorded(tmp_path: Path) -> None:
    spans.record("rollout", "0-0/0", 1)
    given = [f"output_dir={tmp_path}", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    spans.start_recording(parse(compose("base", [*given, "tracing.trace_mb=0"])), tmp_path, "actor_0")
    spans.record("rollout", "0-0/0", 1)
    spans.stop()
    assert not (tmp_path / "traces").exists()

    spans.start_recording(parse(compose("base", given)), tmp_path, "actor_0")
    spans.record("rollout", "0-0/0", 1)
    spans.stop()
    assert len(read(tmp_path / "traces" / "actor_0.jsonl")) == 1


class Collector:
    """A collector that keeps the spans that OpenTelemetry's exporter posts."""

    def __init__(self) -> None:
        collector = self
        self.paths: list[str] = []
        self.bodies: list[bytes] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.append(self.path)
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_collector_gets_the_same_spans_as_the_file(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from pipelinerl.observability.otlp import OTLPSink

    collector = Collector()
    try:
        spans.install(make_writer(tmp_path / "a.jsonl", sink=OTLPSink(collector.url, {"service.name": "actor_0"})))
        spans.record("rollout", "0-17/3", 1_000, 5_000, root=True, reward=1.0)
        spans.record("llm call", "0-17/3", 2_000, 4_000, tokens=9)
        spans.stop()
    finally:
        collector.close()

    assert set(collector.paths) == {"/v1/traces"}
    got = [
        span
        for body in collector.bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    ours = [
        (span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano)
        for span in got
    ]
    written = [
        (s["name"], s["traceId"], s["spanId"], s["parentSpanId"], int(s["startTimeUnixNano"]))
        for s in read(tmp_path / "a.jsonl")
    ]
    assert ours == written
