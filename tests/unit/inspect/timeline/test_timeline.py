"""`pipelinerl timeline`: spans of several processes as rows, arrows and overlap, against hand-computed ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.inspect.timeline.__main__ import main
from pipelinerl.inspect.timeline.chrome import chrome_trace
from pipelinerl.inspect.timeline.overlap import intersection, overlap, under_way, union
from pipelinerl.inspect.timeline.reading import TimelineSpan, between, read_spans
from pipelinerl.observability import spans
from pipelinerl.observability.spans import SpanWriter

SECOND = 1_000_000_000


def write(run_dir: Path, process: str, *found: tuple[str, str, float, float, dict[str, Any]]) -> None:
    """Spans of one process, as its writer writes them. Times are seconds."""
    spans.install(SpanWriter(run_dir / "traces" / f"{process}.jsonl", b"run", {"service.name": process}, 1 << 20))
    for name, trace, start, end, attributes in found:
        root = name in ("rollout", "step")
        spans.record(name, trace, int((100 + start) * SECOND), int((100 + end) * SECOND), root=root, **attributes)
    spans.stop()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two rollouts that overlap and one after them; two steps; one swap."""
    write(
        tmp_path,
        "actor_0.worker0",
        ("rollout", "0-0/0", 0.0, 2.0, {"evaluation": False}),
        ("llm call", "0-0/0", 0.5, 1.5, {"tokens": 8}),
        ("rollout", "0-0/1", 1.0, 4.0, {"evaluation": False}),
        ("llm call", "0-0/1", 1.0, 3.5, {"tokens": 9}),
        ("rollout", "test-0-test-0/0", 5.0, 6.0, {"evaluation": True}),
        ("llm call", "test-0-test-0/0", 5.0, 6.0, {"tokens": 9}),
    )
    write(tmp_path, "preprocessor_0", ("pack", "step 0", 2.0, 2.5, {}), ("preprocess", "0-0/0", 2.0, 2.5, {}))
    write(
        tmp_path,
        "finetune_0",
        ("wait", "step 0", 0.0, 2.5, {}),
        ("micro-batch", "step 0", 2.5, 3.0, {}),
        ("train", "0-0/0", 2.5, 3.0, {"step": 0}),
        ("step", "step 0", 2.5, 3.0, {"step": 0}),
        ("swap", "version 1", 3.1, 3.2, {"server": "actor_llm_0"}),
        ("step", "step 1", 4.0, 5.5, {"step": 1}),
    )
    return tmp_path


def test_spans_of_all_processes_are_read_in_order(run_dir: Path) -> None:
    found = read_spans(run_dir)
    assert [span.start for span in found] == sorted(span.start for span in found)
    assert found[0].start == 0.0
    assert {span.process for span in found} == {"actor_0.worker0", "preprocessor_0", "finetune_0"}
    call = next(span for span in found if span.name == "llm call")
    assert (call.start, call.end, call.attributes) == (0.5, 1.5, {"tokens": 8})
    assert len({span.trace for span in found if span.name in ("train", "preprocess")}) == 1


def test_a_line_that_is_being_written_is_left_out(run_dir: Path) -> None:
    count = len(read_spans(run_dir))
    with open(run_dir / "traces" / "finetune_0.jsonl", "ab") as file:
        file.write(b'{"run":"72756e","resource":{},"spans":[["step","ste')
    (run_dir / "traces" / "finetune_0.1.jsonl").write_bytes((run_dir / "traces" / "preprocessor_0.jsonl").read_bytes())
    found = read_spans(run_dir)
    assert len(found) == count + 2
    assert {span.process for span in found if span.name == "pack"} == {"preprocessor_0", "finetune_0"}


def test_overlap_is_the_hand_computed_one(run_dir: Path) -> None:
    # calls: 0.5–3.5 and 5–6, steps: 2.5–3 and 4–5.5
    found = overlap(read_spans(run_dir))
    assert found.training == pytest.approx(2.0)
    assert found.generating == pytest.approx(4.0)
    assert found.both == pytest.approx(1.0)
    assert found.paused == pytest.approx(0.1)
    assert "50.0%" in found.text


def test_intervals() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]
    assert intersection([(0, 2), (3, 9)], [(1, 4), (5, 6)]) == [(1, 2), (3, 4), (5, 6)]
    assert intersection([], [(1, 2)]) == []
    assert under_way([(0, 2), (1, 3)]) == ([0, 1, 2, 3], [1, 2, 1, 0])
    assert under_way([(0, 1), (1, 2)])[1] == [1, 0, 1, 0]


def test_rows_of_a_process_hold_no_overlapping_boxes(run_dir: Path) -> None:
    events = chrome_trace(read_spans(run_dir))["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    placed = {(rows[box["pid"], box["tid"]], box["name"], round(box["ts"] / 1e6, 3)) for box in boxes}
    assert {
        ("rollouts", "rollout", 0.0),
        ("rollouts", "llm call", 0.5),
        ("rollouts 2", "rollout", 1.0),
        ("rollouts 2", "llm call", 1.0),
        ("rollouts", "rollout", 5.0),
        ("training", "micro-batch", 2.5),
        ("training", "step", 4.0),
        ("actor_llm_0", "swap", 3.1),
    } <= placed
    assert not any(box["name"] in ("train", "preprocess") for box in boxes)


def test_an_arrow_leads_from_the_rollout_to_its_training(run_dir: Path) -> None:
    events = chrome_trace(read_spans(run_dir))["traceEvents"]
    (start,) = (event for event in events if event["ph"] == "s")
    (end,) = (event for event in events if event["ph"] == "f")
    assert start["id"] == end["id"]
    assert start["ts"] == pytest.approx(2e6 - 1)
    assert end["ts"] == pytest.approx(2.5e6)


def test_command_writes_trace_and_picture(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = run_dir / "overlap.png"
    assert main([str(run_dir), "--png", str(picture), "--to", "4.5"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.search(r"training \d+\.\d s, generating \d+\.\d s.* \d+\.\d% .* paused \d+\.\d\d s", printed)
    events = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    assert {event["args"]["trace"] for event in events if event["name"] == "llm call"} == {"0-0/0", "0-0/1"}
    assert max(event["ts"] for event in events if "ts" in event) <= 4.5e6


def test_a_run_without_spans_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.trace_mb"):
        main([str(tmp_path)])


def test_many_rollouts_are_laid_out_fast_enough_to_be_read() -> None:
    found = [
        TimelineSpan(process="w", name="rollout", trace=str(i), start=i / 100, end=i / 100 + 0.64)
        for i in range(10_000)
    ]
    rows = {event["tid"] for event in chrome_trace(found)["traceEvents"] if event["ph"] == "X"}
    assert len(rows) in (64, 65)
    assert len(between(found, 10.0, 11.0)) == 165
