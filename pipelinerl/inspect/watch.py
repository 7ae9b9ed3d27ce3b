"""Finds new alarms of a running run. It reads only the new points of the metrics files and reports each alarm once."""

import json
import time
from pathlib import Path

from pipelinerl.config.paths import metrics_file
from pipelinerl.inspect.alarms import READ, READ_OF_DOMAINS, UNKNOWN, Alarm, History, Settings, alarms
from pipelinerl.inspect.progress import blocked_places
from pipelinerl.observability.metrics import Point
from pipelinerl.observability.status import read_statuses
from pipelinerl.records import CalibrationExceeded, ProbeMissed, TrainerMessage, WeightUpdateSuccess

EVERY_S = 5.0


class MetricsTail:
    """Reads the new points of one role's metrics file and keeps the metrics that alarms read."""

    def __init__(self, path: Path):
        self._path = path
        self._place = 0
        self.points: list[Point] = []

    def read(self) -> None:
        """Read the new points. Starts again if the file became shorter, because a resumed trainer cuts it."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._place:
                    self._place, self.points = 0, []
                file.seek(self._place)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return
        for line in whole.splitlines():
            try:
                point = json.loads(line)
            except ValueError:
                continue
            self.points.append(
                {name: value for name, value in point.items() if name in READ or name.startswith(READ_OF_DOMAINS)}
            )
        self._place += len(whole) + 1 if whole else 0


class AlarmWatch:
    """Finds alarms that have not been reported yet.

    Args:
        settings: what the cures look at.
        every_s: least seconds between two looks at the metrics.
    """

    def __init__(self, run_dir: Path, *, settings: Settings = UNKNOWN, every_s: float = EVERY_S):
        kinds = ("finetune", "actor", "preprocessor")
        self._run_dir = run_dir
        self._tails = {kind: MetricsTail(metrics_file(run_dir, kind)) for kind in kinds}
        self._messages: list[TrainerMessage] = []
        self._settings, self._every_s = settings, every_s
        self._next = 0.0
        self._told: set[tuple[str, str]] = set()

    def add_message(self, message: TrainerMessage) -> None:
        """Take a message of the trainer into account."""
        if isinstance(message, ProbeMissed | CalibrationExceeded | WeightUpdateSuccess):
            self._messages.append(message)
        if isinstance(message, ProbeMissed):
            self._next = 0.0  # it may be the last message of the run

    def new(self) -> list[Alarm]:
        """Return the alarms that have not been returned before. Empty if the last look was less than `every_s` ago."""
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + self._every_s
        for tail in self._tails.values():
            tail.read()
        history = History(
            finetune=self._tails["finetune"].points,
            actor=self._tails["actor"].points,
            preprocessor=self._tails["preprocessor"].points,
            messages=self._messages,
            settings=self._settings,
            blocked_at=blocked_places(read_statuses(self._run_dir)),
        )
        found = [alarm for alarm in alarms(history) if (alarm.name, alarm.server) not in self._told]
        self._told |= {(alarm.name, alarm.server) for alarm in found}
        return found
