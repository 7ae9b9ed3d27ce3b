"""The launcher's part in trackers: alarms, a table of archived rollouts every n steps, and the report at the end."""

from functools import cache, partial
from pathlib import Path
from typing import Any

from pipelinerl.config.sections import Config
from pipelinerl.inspect.decode import TokenText, text_or_numbers
from pipelinerl.inspect.finding import Finding
from pipelinerl.inspect.rollouts import whole_text
from pipelinerl.inspect.samples import SeenRollout, from_archive, read_scored_sequences
from pipelinerl.observability.archive import read_archive
from pipelinerl.observability.trackers import WITH_TEXT, Tracker, TrackerThread
from pipelinerl.records import ArchivedStep

COLUMNS = (
    *("step", "sample", "domain", "problem", "text", "reward", "advantage", "success", "fate", "lag", "tokens"),
    *("finish_reason", "flags"),
)
MAX_ROWS = 16
"""Rollouts in a table, which a person can read."""
MAX_CHARS = 8000
"""Characters of a problem and of a text in a table, about 2,000 tokens, so that trackers show it."""


def sample_rows(run_dir: Path, step: int, text: TokenText) -> list[list[Any]]:
    """Rows of ``COLUMNS`` for up to `MAX_ROWS` archived rollouts of a step: the flagged ones, then by their names."""
    scores = read_scored_sequences(run_dir, step)
    found = [
        from_archive(rollout, step, scores)
        for _, _, records in read_archive(run_dir, "preprocessor", ArchivedStep, step)
        for record in records
        for rollout in record.rollouts
    ]
    found.sort(key=lambda seen: (not seen.flags, seen.sample_id))
    return [_row(seen, text) for seen in found[:MAX_ROWS]]


def _row(seen: SeenRollout, text: TokenText) -> list[Any]:
    return [
        seen.step,
        seen.sample_id,
        seen.domain,
        seen.problem[:MAX_CHARS],
        whole_text(seen, text)[:MAX_CHARS],
        seen.rollout.reward,
        seen.advantage,
        seen.success,
        seen.outcome,
        seen.lag,
        seen.rollout.num_sampled,
        seen.finish_reason,
        " ".join(seen.flags),
    ]


KIND = "launcher"


class RunTracking:
    """The launcher's runs in those trackers that take text."""

    def __init__(self, cfg: Config, run_dir: Path):
        self._run_dir, self._every = run_dir, cfg.wandb.sample_steps
        self._threads = [TrackerThread(name, cfg, run_dir, KIND) for name in cfg.trackers if name in WITH_TEXT]
        self._newest = 0

    def step(self, step: int) -> None:
        """Send the table of the newest optimizer step when it is due, after ``step`` of them."""
        due = self._every and step // self._every > self._newest // self._every
        self._newest = step
        for thread in self._threads if due else ():
            thread.put(partial(send_table, run_dir=self._run_dir, step=step - 1))

    def alarm(self, finding: Finding) -> None:
        for thread in self._threads:
            thread.put(lambda tracker: tracker.alert(finding.title, finding.line()))

    def keep(self, path: Path) -> None:
        """Keep a file as an artefact."""
        for thread in self._threads:
            thread.put(lambda tracker: tracker.keep(path))

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


def send_table(tracker: Tracker, *, run_dir: Path, step: int) -> None:
    """Send the table of one step's rollouts."""
    rows = sample_rows(run_dir, step, token_text_of(run_dir))
    if rows:
        tracker.table(f"{KIND}/rollouts", COLUMNS, rows, step + 1)


@cache
def token_text_of(run_dir: Path) -> TokenText:
    """The run's tokenizer, or numbers if it cannot be loaded."""
    return text_or_numbers(run_dir)
