"""Builds one HTML file from run folders. Data (gzip in base64), style and program are inlined."""

import base64
import gzip
import html
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.inspect.decode import text_or_numbers
from pipelinerl.inspect.ending import ending_findings, read_ending
from pipelinerl.inspect.finding import as_json, found
from pipelinerl.inspect.page.browser import within
from pipelinerl.inspect.page.classes import by_length
from pipelinerl.inspect.page.data import run_data
from pipelinerl.inspect.reading import look_into
from pipelinerl.inspect.samples import Candidates, SeenRollout, read_tests, read_training
from pipelinerl.inspect.why.evidence import evidence_of, read_source, unreadable_share
from pipelinerl.inspect.why.metrics import METRICS
from pipelinerl.world.disk import replace_file

log = logging.getLogger(__name__)

MAX_PAGE_BYTES = 5 * 2**20
"""A page that a mail or an issue takes as an attachment."""
MAX_ROLLOUT_BYTES = 12 * 2**20
"""Bytes of the JSON of the rollouts of all runs, before compression."""


def write_page(run_dirs: Sequence[Path], path: Path) -> int:
    """Write the page and return its size in bytes."""
    page = build_page(collect_all(run_dirs))
    replace_file(path, page, mode=0o600)
    return len(page)


def collect_all(run_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the data of each run for one page, under names that differ."""
    found = [collect(run_dir, MAX_ROLLOUT_BYTES // len(run_dirs)) for run_dir in run_dirs]
    return [run | {"name": name} for run, name in zip(found, names_of(run_dirs), strict=True)]


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """The last parts of the folders' paths, as many as all folders need to differ."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    longest = max(map(len, parts))
    count = next(n for n in range(1, longest + 1) if len({one[-n:] for one in parts}) == len(set(parts)))
    return [str(Path(*one[-count:])) for one in parts]


def collect(run_dir: Path, max_bytes: int = MAX_ROLLOUT_BYTES) -> dict[str, Any]:
    """Return the data of a run for the page, with at most `max_bytes` of rollouts."""
    with look_into(run_dir):
        source = read_source(run_dir)
        text = text_or_numbers(run_dir, log_missing_text)
        training, tests = Candidates(), Candidates()
        replicas = source.cfg.world.replicas
        lengths: list[tuple[int, int, bool]] = []
        training.add(noting_lengths(read_training(run_dir, replicas=replicas), lengths))
        tests.add(read_tests(run_dir, replicas=replicas))
    chosen = within(training.in_turn(), text, max_bytes * 4 // 5)
    evaluated = within(tests.in_turn(), text, max_bytes // 5)
    ending = read_ending(run_dir)
    evidence = replace(evidence_of(source), unreadable_share=unreadable_share(training.in_turn(), text))
    data = run_data(source, ending)
    return data | {
        "charts": data["charts"] + by_length(lengths),
        "alarms": as_json([*ending_findings(ending), *found(METRICS, evidence)], run_dir),
        "rollouts": chosen + evaluated,
        "note": f"{len(chosen):,} of {training.seen:,} training rollouts and {len(evaluated):,} of {tests.seen:,} "
        "evaluation rollouts that are on record, chosen evenly over the steps, flagged ones first.",
    }


def noting_lengths(rollouts: Iterable[SeenRollout], lengths: list[tuple[int, int, bool]]) -> Iterator[SeenRollout]:
    """The rollouts, whose (step, sampled tokens, success) are added to ``lengths`` as they pass."""
    for seen in rollouts:
        if seen.step is not None and seen.success is not None:
            lengths.append((seen.step, seen.rollout.num_sampled, seen.success))
        yield seen


def log_missing_text(error: ConfigError) -> None:
    log.warning("event=report_without_text reason=%s", error)


def build_page(runs: Sequence[dict[str, Any]], *, live: bool = False) -> bytes:
    """Return the page of ``collect``'s runs. Rollouts are halved until it fits into `MAX_PAGE_BYTES`.

    ``live``: the page asks its server for new data.
    """
    while True:
        page = _fill(runs, live)
        if len(page) <= MAX_PAGE_BYTES or not any(run["rollouts"] for run in runs):
            return page
        runs = [run | {"rollouts": run["rollouts"][::2], "note": run["note"] + " Halved to fit."} for run in runs]


def encode(runs: Sequence[dict[str, Any]]) -> bytes:
    """Return the page's data as gzip of JSON, which has null for NaN and infinities."""
    document = {"made": time.strftime("%Y-%m-%d %H:%M:%S"), "runs": runs}
    return gzip.compress(msgspec.json.encode(document), 6, mtime=0)


def _fill(runs: Sequence[dict[str, Any]], live: bool) -> bytes:
    parts = {
        "TITLE": html.escape(", ".join(run["name"] for run in runs)),
        "STYLE": part("page.css"),
        "PROGRAM": part("page.js"),
        "LIVE": "true" if live else "false",
        "DATA": base64.b64encode(encode(runs)).decode(),
    }
    page = part("page.html")
    for name, value in parts.items():
        page = page.replace("{{" + name + "}}", value, 1)
    return page.encode()


def part(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


LOOPBACK = "127.0.0.1"


class LiveRuns:
    """The data of the runs, read again if it is older than `fresh_s`. Any thread may ask for it."""

    def __init__(self, run_dirs: Sequence[Path], fresh_s: float = 2.0):
        self._run_dirs, self._fresh_s = run_dirs, fresh_s
        self._lock = threading.Lock()
        self._read_at = -float("inf")
        self._runs: list[dict[str, Any]] = []

    def runs(self) -> list[dict[str, Any]]:
        with self._lock:
            if time.monotonic() - self._read_at > self._fresh_s:
                self._runs = collect_all(self._run_dirs)
                self._read_at = time.monotonic()
            return self._runs


def make_server(live: LiveRuns, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the page at `/` and of its data at `/data`. Pages of other sites cannot read them."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").partition(":")[0]
            if host not in (LOOPBACK, "localhost"):
                self.send_error(403, "only as 127.0.0.1 or localhost")
            elif self.path == "/":
                self._answer("text/html; charset=utf-8", build_page(live.runs(), live=True))
            elif self.path == "/data":
                self._answer("application/octet-stream", encode(live.runs()))
            else:
                self.send_error(404)

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return ThreadingHTTPServer((LOOPBACK, port), Handler)
