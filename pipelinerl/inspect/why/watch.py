"""Finds what looks wrong while a run goes on: reads the new points of the metrics files, and reports each once."""

import time
from dataclasses import replace
from pathlib import Path

from pipelinerl.config.paths import metrics_file
from pipelinerl.config.sections import Config
from pipelinerl.inspect.balance import read_splits
from pipelinerl.inspect.finding import Finding, found
from pipelinerl.inspect.progress import blocked_places
from pipelinerl.inspect.series import Series
from pipelinerl.inspect.why.evidence import Evidence
from pipelinerl.inspect.why.metrics import METRICS
from pipelinerl.observability.metrics import points_of
from pipelinerl.observability.status import read_statuses
from pipelinerl.records import CalibrationExceeded, ProbeMissed, TrainerMessage, WeightUpdateSuccess

EVERY_S = 5.0
"""Metrics are written once a step, and a look takes milliseconds."""
MOST_POINTS = 8192
"""Points of a role that a look goes through, some 5 MB. Findings compare the newest 128 at most with the first ones."""


class MetricsTail:
    """Adds the new points of one role's metrics file to a series."""

    def __init__(self, run_dir: Path, role: str, series: Series):
        self._path, self._role, self._series = metrics_file(run_dir, role), role, series
        self._place = 0

    def read(self) -> None:
        """Read the new points. Starts again if the file became shorter, because a resumed trainer cuts it."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._place:
                    self._place = 0
                    self._series.clear(self._role)
                file.seek(self._place)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return
        self._series.add(self._role, points_of(whole.split(b"\n")))
        self._place += len(whole) + 1 if whole else 0


class AlarmWatch:
    """Finds what has not been told yet. ``every_s``: least seconds between two looks at the metrics."""

    def __init__(self, run_dir: Path, cfg: Config, *, every_s: float = EVERY_S):
        self._run_dir, self._every_s = run_dir, every_s
        self._messages: list[TrainerMessage] = []
        splits, series = read_splits(run_dir, cfg), Series(MOST_POINTS)
        self._seen = Evidence(cfg=cfg, splits=splits, messages=self._messages, series=series)
        roles = ("finetune", "actor", "preprocessor")
        self._tails = [MetricsTail(run_dir, role, series) for role in roles]
        self._next = 0.0
        self._told: set[tuple[str, str]] = set()

    def add_message(self, message: TrainerMessage) -> None:
        """Take a message of the trainer into account."""
        if isinstance(message, WeightUpdateSuccess):
            self._forget_updates(message)
        if isinstance(message, ProbeMissed | CalibrationExceeded | WeightUpdateSuccess):
            self._messages.append(message)
        if isinstance(message, ProbeMissed):
            self._next = 0.0  # it may be the last message of the run

    def _forget_updates(self, newest: WeightUpdateSuccess) -> None:
        """Forget what the newest update and the one before it say as well, so that a long run keeps few of them."""
        updates = [message for message in self._messages if isinstance(message, WeightUpdateSuccess)]
        for update in updates[:-1]:
            if set(update.servers) <= set(newest.servers):
                self._messages.remove(update)

    def new(self) -> list[Finding]:
        """What has not been returned before. Empty if the last look was less than `every_s` ago."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + self._every_s
        for tail in self._tails:
            tail.read()
        seen = replace(self._seen, blocked_at=blocked_places(read_statuses(self._run_dir)))
        new = [one for one in found(METRICS, seen) if (one.title, one.about) not in self._told]
        self._told |= {(one.title, one.about) for one in new}
        return new
