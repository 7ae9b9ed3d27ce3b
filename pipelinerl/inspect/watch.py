"""Alarms of a run that goes on: reads what the metrics files have got since it last looked, tells every alarm once."""

import json
import time
from pathlib import Path
from typing import Any

from pipelinerl.inspect.alarms import READ, Alarm, History, alarms
from pipelinerl.records import ProbeMissed, TrainerMessage, WeightUpdateSuccess

EVERY_S = 5.0


class MetricsTail:
    """The points of one role, of which only the metrics that alarms read are kept."""

    def __init__(self, path: Path):
        self._path = path
        self._place = 0
        self.points: list[dict[str, Any]] = []

    def read(self) -> None:
        """Take what is new; begin again when the file has been cut, as a resumed trainer does."""
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
            self.points.append({name: point[name] for name in READ if name in point})
        self._place += len(whole) + 1 if whole else 0


class AlarmWatch:
    """Alarms that have not been told.

    Args:
        run_dir: the run folder.
        steps_per_update: optimizer steps between two weight updates.
        every_s: how often it looks at most.
    """

    def __init__(self, run_dir: Path, *, steps_per_update: int = 1, every_s: float = EVERY_S):
        kinds = ("finetune", "actor", "preprocessor")
        self._tails = {kind: MetricsTail(run_dir / "metrics" / f"{kind}.jsonl") for kind in kinds}
        self._messages: list[TrainerMessage] = []
        self._steps_per_update, self._every_s = steps_per_update, every_s
        self._next = 0.0
        self._told: set[tuple[str, int | None]] = set()

    def take(self, message: TrainerMessage) -> None:
        """A message of the trainer."""
        if isinstance(message, ProbeMissed | WeightUpdateSuccess):
            self._messages.append(message)
        if isinstance(message, ProbeMissed):
            self._next = 0.0  # it may be the last message of the run

    def new(self) -> list[Alarm]:
        """What looks wrong now and has not been told; nothing when it is too early to look again."""
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
            steps_per_update=self._steps_per_update,
        )
        found = [alarm for alarm in alarms(history) if (alarm.name, alarm.step) not in self._told]
        self._told |= {(alarm.name, alarm.step) for alarm in found}
        return found
