"""Spans in Chrome's trace format, which Perfetto opens: rows for each process, arrows from rollouts to training."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pipelinerl.inspect.timeline.reading import TimelineSpan

LANES = {
    "rollout": "rollouts",
    "llm call": "rollouts",
    "group": "groups",
    "evaluation": "evaluation",
    "pack": "packing",
    "wait": "training",
    "step": "training",
    "micro-batch": "training",
    "snapshot": "training",
}
"""Row of a process in which spans of this name are drawn. Others have a row of their own name."""
INSIDE = ("llm call", "micro-batch")
"""Drawn inside a span of the same row, never in a row of their own."""
LINKS = ("preprocess", "train")
"""Parts of a rollout's trace that are drawn as an arrow to the batch, not as boxes."""


class Rows:
    """Assigns spans to rows so that those of one row do not overlap, except inside each other."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        self._count: dict[tuple[str, str], int] = defaultdict(int)
        self._of_trace: dict[tuple[str, str], str] = {}

    def row_of(self, span: TimelineSpan) -> str:
        """The name of the span's row. Spans must come by start, longer ones first."""
        name = lane_of(span)
        if span.name in INSIDE:
            return self._of_trace.get((span.process, span.trace), name)
        key = (span.process, name)
        free = self._free[key]
        if free and free[0][0] <= span.start:
            number = heapq.heappop(free)[1]
        else:
            number = self._count[key]
            self._count[key] += 1
        heapq.heappush(free, (span.end, number))
        row = f"{name} {number + 1}" if number else name
        self._of_trace[span.process, span.trace] = row
        return row


def lane_of(span: TimelineSpan) -> str:
    """Transfers and swaps have a row for each server."""
    return str(span.attributes.get("server") or LANES.get(span.name, span.name))


def chrome_trace(spans: Sequence[TimelineSpan]) -> dict[str, Any]:
    """The spans in Chrome's trace format: a group of rows for each process, an arrow from rollout to micro-batch."""
    rows, processes, threads = Rows(), _Numbers(), _Numbers()
    events: list[dict[str, Any]] = []
    ends: dict[str, dict[str, Any]] = {}
    for span in spans:
        pid = processes.of(span.process)
        if span.name in LINKS:
            if span.name == "train" and span.trace in ends:
                tid = threads.of((span.process, LANES["step"]))
                events += _arrow(ends.pop(span.trace), {"pid": pid, "tid": tid, "ts": 1e6 * span.start})
            continue
        tid = threads.of((span.process, rows.row_of(span)))
        event = {"ph": "X", "name": span.name, "pid": pid, "tid": tid, "ts": 1e6 * span.start}
        event |= {"dur": 1e6 * (span.end - span.start), "args": span.attributes | {"trace": span.trace}}
        events.append(event)
        if span.name == "rollout":
            ends[span.trace] = {"pid": pid, "tid": tid, "ts": 1e6 * span.end - 1}
    names = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}}
        for process, number in processes.numbers.items()
    ]
    names += [
        {"ph": "M", "name": "thread_name", "pid": processes.of(process), "tid": number, "args": {"name": row}}
        for (process, row), number in threads.numbers.items()
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def _arrow(start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
    common = {"cat": "rollout", "name": "trained", "id": f"{start['pid']}/{start['tid']}/{start['ts']:.0f}"}
    return [common | start | {"ph": "s"}, common | end | {"ph": "f", "bp": "e"}]


class _Numbers:
    """Numbers names in the order in which they first appear."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        return self.numbers.setdefault(thing, len(self.numbers) + 1)
