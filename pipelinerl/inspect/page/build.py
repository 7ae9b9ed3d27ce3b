"""Builds one HTML file from run folders. Data, style and program are inlined, and the page loads no other file.

The data is gzip in base64, which all current browsers can unpack.
"""

import base64
import gzip
import html
import logging
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import ConfigError
from pipelinerl.host.disk import replace_file
from pipelinerl.inspect.alarms import History, alarms
from pipelinerl.inspect.decode import TokenText, text_or_numbers
from pipelinerl.inspect.ending import ending_alarms, read_ending
from pipelinerl.inspect.outside import look_into
from pipelinerl.inspect.page.browser import Candidates, unreadable_share, within
from pipelinerl.inspect.page.data import RunSource, read_source, run_data
from pipelinerl.inspect.samples import SeenRollout, read_tests, read_training

log = logging.getLogger(__name__)

MAX_PAGE_BYTES = 5 * 2**20
MAX_ROLLOUT_BYTES = 12 * 2**20
"""Bytes of the JSON of the rollouts of all runs, before compression."""
CHECKED_FOR_TEXT = 200
"""Number of rollouts that are decoded to find out whether the tokenizer fits the model."""


def write_page(run_dirs: Sequence[Path], path: Path) -> int:
    """Write the page and return its size in bytes."""
    page = build_page([collect(run_dir, MAX_ROLLOUT_BYTES // len(run_dirs)) for run_dir in run_dirs])
    replace_file(path, page, mode=0o600)
    return len(page)


def collect(run_dir: Path, max_bytes: int = MAX_ROLLOUT_BYTES) -> dict[str, Any]:
    """Return the data of a run for the page, with at most `max_bytes` of rollouts."""
    with look_into(run_dir):
        source = read_source(run_dir)
        text = text_or_numbers(run_dir, log_missing_text)
        training, tests = Candidates(), Candidates()
        replicas = source.cfg.world.replicas
        training.take(read_training(run_dir, replicas=replicas))
        tests.take(read_tests(run_dir, replicas=replicas))
    chosen = within(training.in_turn(), text, max_bytes * 4 // 5)
    evaluated = within(tests.in_turn(), text, max_bytes // 5)
    ending = read_ending(run_dir)
    found = ending_alarms(ending) + alarms(history_of(source, measure_unreadable(training, text)))
    return run_data(source, ending) | {
        "alarms": [vars(alarm) for alarm in found],
        "rollouts": chosen + evaluated,
        "note": f"{len(chosen):,} of {training.seen:,} training rollouts and {len(evaluated):,} of {tests.seen:,} "
        "evaluation rollouts that are on record, chosen evenly over the steps, flagged ones first.",
    }


def history_of(source: RunSource, unreadable_tokens: float | None = None) -> History:
    return History(
        finetune=source.finetune,
        actor=source.actor,
        preprocessor=source.preprocessor,
        messages=source.records.trainer,
        steps_per_update=max(source.cfg.finetune.weight_update_interval, source.cfg.steps_per_phase),
        unreadable_share=unreadable_tokens,
    )


def measure_unreadable(candidates: Candidates, text: TokenText) -> float | None:
    def first() -> Iterator[SeenRollout]:
        yield from (seen for seen, _ in zip(candidates.in_turn(), range(CHECKED_FOR_TEXT), strict=False))

    return unreadable_share(first(), text)


def log_missing_text(error: ConfigError) -> None:
    log.warning("event=report_without_text reason=%s", error)


def build_page(runs: Sequence[dict[str, Any]], *, live: bool = False) -> bytes:
    """Return the page. Rollouts are halved until it fits into `MAX_PAGE_BYTES`.

    Args:
        runs: data of each run, from `collect`.
        live: the page asks its server for new data.
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
