"""Metrics of a role: one JSON object per line in `metrics/<kind>.jsonl`, and the same points in the trackers.

The file is authoritative and is written at once. Beyond `launcher.max_log_mb` it loses every second of its older
points. If a resumed trainer repeats steps, the file has the new points, and trackers keep the first ones.
"""

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from pipelinerl.config.paths import metrics_file
from pipelinerl.config.sections import Config
from pipelinerl.observability.catalogue import STEP, MetricName, warn_undeclared
from pipelinerl.observability.trackers import Tracker, TrackerThread
from pipelinerl.world.disk import replace_file, replacement

log = logging.getLogger(__name__)

Point = Mapping[MetricName, Any]
"""One line of a role's metrics: `STEP`, `TIME` and values."""
Points = Sequence[Point]
"""A role's metrics as `read_metrics` returns them."""


class MetricsLogger:
    """Logs metrics of one job.

    Args:
        kind: names the file and the run in trackers (e.g. `actor`, `finetune`).
        once_per_step: trackers get one point of a step in the whole run, also if processes repeat the step.

    >>> metrics = MetricsLogger(cfg, run_dir, "finetune")
    >>> metrics.log({TrainerMetric.LOSS: 0.1}, step=3)
    """

    def __init__(self, cfg: Config, run_dir: Path | str, kind: str, *, once_per_step: bool = False):
        self._path = metrics_file(run_dir, kind)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._kind = kind
        self._file = _open_lines(self._path)
        self._max_bytes, self._num_bytes = cfg.launcher.max_log_mb * 2**20, self._path.stat().st_size
        self._known: set[MetricName] = set()
        self._lock = threading.Lock()
        self._trackers = {name: TrackerThread(name, cfg, Path(run_dir), kind) for name in cfg.trackers}
        self._sent = {
            name: SentSteps(self._path.with_suffix(f".{name}")) for name in (self._trackers if once_per_step else ())
        }

    def log(self, values: Mapping[MetricName, float], step: int) -> None:
        """Append one point. NaN and infinities become null. An undeclared name gives a warning."""
        warn_undeclared(self._kind, values.keys() - self._known)
        self._known |= values.keys()
        point = {name: _number(value) for name, value in values.items()}
        line = json.dumps({"step": step, "time": time.time(), **point})
        with self._lock:
            try:
                self._write(line + "\n")
            except OSError as error:  # a full disk costs a point, never a step of the run
                log.warning("event=metrics_lost file=%s error=%s", self._path, error)
        given = {f"{self._kind}/{name}": value for name, value in point.items() if value is not None}
        for name, tracker in self._trackers.items():
            tracker.put(partial(_send, point=given, step=step, sent=self._sent.get(name)))

    def sync(self) -> None:
        """Wait until every point so far is on disk. Any thread may call it, and `log` does not wait for it."""
        with self._lock:
            descriptor = os.dup(self._file.fileno())
        try:
            os.fsync(descriptor)
        except OSError as error:  # as in `log`
            log.warning("event=metrics_lost file=%s error=%s", self._path, error)
        finally:
            os.close(descriptor)

    def _write(self, line: str) -> None:
        self._file.write(line)
        self._num_bytes += len(line)
        if self._num_bytes > self._max_bytes:
            self._num_bytes //= 2  # if thinning fails, it is tried again much later
            thin(self._path)
            self._file.close()
            self._file = _open_lines(self._path)
            self._num_bytes = self._path.stat().st_size

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        for tracker in self._trackers.values():
            tracker.close()


def _open_lines(path: Path) -> TextIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8", buffering=1)


def thin(path: Path) -> None:
    """Delete every second line of the older half, atomically."""
    half, read = path.stat().st_size // 2, 0
    with open(path, "rb") as old, replacement(path, mode=0o600) as new:
        for number, line in enumerate(old):
            read += len(line)
            if read > half or number % 2 == 0:
                new.write(line)


def drop_points_after(run_dir: Path | str, kind: str, step: int) -> int:
    """Delete the points after `step`, which a resumed trainer repeats. Returns the number of these steps."""
    path = metrics_file(run_dir, kind)
    points = read_metrics(run_dir, kind)
    kept = [point for point in points if point[STEP] <= step]
    if len(kept) < len(points):
        replace_file(path, "".join(json.dumps(point) + "\n" for point in kept), mode=0o600)
    return len({point[STEP] for point in points if point[STEP] > step})


def read_metrics(run_dir: Path | str, kind: str) -> list[Point]:
    """Return all points of a kind in order, without damaged lines."""
    try:
        return points_of(metrics_file(run_dir, kind).read_bytes().split(b"\n"))
    except FileNotFoundError:
        return []


def points_of(lines: Iterable[bytes]) -> list[Point]:
    """Return the points of a metrics file's lines, without damaged ones."""
    points: list[Point] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            point = json.loads(line)
            points += [point] if isinstance(point, dict) else []
    return points


def _number(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


class SentSteps:
    """The newest step that a tracker got, in a file that outlives the process."""

    def __init__(self, path: Path):
        self._path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._newest = int(text) if text.strip().isdecimal() else -1

    def is_new(self, step: int) -> bool:
        """Whether ``step`` is newer than all steps so far, and note it."""
        if step <= self._newest:
            return False
        self._newest = step
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{step:020d}\n")  # of constant length, so that no moment leaves the file empty
        return True


def _send(tracker: Tracker, *, point: dict[str, float], step: int, sent: SentSteps | None) -> None:
    """Send a point, in the tracker's thread, unless the tracker has one of this step."""
    if sent is None or sent.is_new(step):
        tracker.log(point, step)
