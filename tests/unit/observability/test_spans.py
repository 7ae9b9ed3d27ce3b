"""Spans of processes: ids that every process computes alike, files that are bounded, a collector that gets the same."""

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.inspect.timeline.reading import in_file
from pipelinerl.observability import spans
from pipelinerl.observability.spans import SpanIds, SpanRecord, SpanWriter, span_ids, with_ids

RUN = b"run"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    spans.stop()


def make_writer(path: Path, max_bytes: int = 1 << 20, sink: Any = None) -> SpanWriter:
    return SpanWriter(path, RUN, {"service.name": "actor_0", "process.pid": 7}, max_bytes, sink)


def read(path: Path) -> list[tuple[SpanRecord, SpanIds]]:
    """The spans of a file with the ids that a collector gets."""
    return [span for batch in in_file(path) for span in with_ids(batch)]


def test_processes_of_a_run_write_into_one_trace_without_talking(tmp_path: Path) -> None:
    for name, root in (("rollout", True), ("preprocess", False), ("train", False)):
        writer = make_writer(tmp_path / f"{name}.jsonl")
        spans.install(writer)
        spans.record(name, "0-17/3", time.time_ns(), root=root)
        spans.stop()
    found = {name: read(tmp_path / f"{name}.jsonl")[0][1] for name in ("rollout", "preprocess", "train")}

    assert len({ids.trace_id for ids in found.values()}) == 1
    assert len({ids.span_id for ids in found.values()}) == 3
    assert found["rollout"].parent_id == ""
    assert {found[name].parent_id for name in ("preprocess", "train")} == {found["rollout"].span_id}


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


def test_a_line_of_the_file_has_the_process_and_its_spans(tmp_path: Path) -> None:
    spans.install(make_writer(tmp_path / "actor_0.jsonl"))
    spans.record("step", "step 7", 1_000, 5_000, root=True, tokens=3, loss=0.5, kind="a", done=True)
    spans.record("rollout", "0-1/0", 2_000, 3_000, reward=float("nan"))  # JSON has no such number
    spans.stop()

    (batch,) = in_file(tmp_path / "actor_0.jsonl")
    assert batch.resource == {"service.name": "actor_0", "process.pid": 7}
    step = SpanRecord("step", "step 7", 1_000, 5_000, True, {"tokens": 3, "loss": 0.5, "kind": "a", "done": True})
    assert batch.spans == (step, SpanRecord("rollout", "0-1/0", 2_000, 3_000, False, {"reward": None}))


def test_file_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    path, bound = tmp_path / "actor_0.jsonl", 5_000
    for part in range(20):
        spans.install(make_writer(path, bound))  # each writes its part in one flush
        for number in range(10):
            spans.record("rollout", f"{part}-{number}/0", part * 10 + number, root=True)
        spans.stop()
    files = [path.with_name("actor_0.1.jsonl"), path]
    assert sum(file.stat().st_size for file in files if file.exists()) <= bound + 10 * 60 + 100
    starts = [span.start for file in files if file.exists() for span, _ in read(file)]
    assert starts == list(range(starts[0], 200))
    assert len(starts) >= 30


def test_spans_beyond_65536_that_wait_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "FLUSH_S", 3600.0)  # the thread writes at the end only
    writer = make_writer(tmp_path / "actor_0.jsonl", 1 << 30)
    for number in range(65_536 + 2):
        writer.put(SpanRecord("rollout", "0-0/0", number, number, True, {}))
    writer.close()
    assert "event=spans_lost count=2" in caplog.text
    assert read(tmp_path / "actor_0.jsonl")[0][0].start == 2


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
    written = [(span.name, *ids, span.start) for span, ids in read(tmp_path / "a.jsonl")]
    assert ours == written
