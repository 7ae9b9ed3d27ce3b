"""Metrics of a role: one JSON object per line in `metrics/<kind>.jsonl`, and the same points in wandb.

The file is authoritative and is written at once. Beyond `launcher.max_log_mb` it loses every second of its older
points, so that a bounded file keeps the whole curve of a long run. wandb runs in its own thread behind a bounded queue.
A slow, missing or failing wandb loses points of its curve but never delays a step.

A resumed trainer repeats steps. The file then loses the points of their first time, which cannot be taken back from
wandb. There the first time stays: a point that repeats a step is not sent.
"""

import contextlib
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pipelinerl.config.sections import Config
from pipelinerl.host.disk import replace_file, replacement
from pipelinerl.observability import wandb as wandb_run
from pipelinerl.observability.catalogue import warn_undeclared

log = logging.getLogger(__name__)

QUEUE_POINTS = 10_000
FINISH_TIMEOUT_S = 5.0

Points = Sequence[dict[str, Any]]
"""A role's metrics as `read_metrics` returns them."""


class MetricsLogger:
    """Logs metrics of one job.

    Args:
        cfg: configuration of the run.
        run_dir: run folder.
        kind: names the file and the wandb run (e.g. `actor`, `finetune`).
        once_per_step: wandb gets one point of a step in the whole run, however often processes of this job repeat it.

    >>> metrics = MetricsLogger(cfg, run_dir, "finetune")
    >>> metrics.log({"loss": 0.1}, step=3)
    """

    def __init__(self, cfg: Config, run_dir: Path | str, kind: str, *, once_per_step: bool = False):
        self._path = Path(run_dir) / "metrics" / f"{kind}.jsonl"
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._kind = kind
        self._file = _open_lines(self._path)
        self._max_bytes, self._num_bytes = cfg.launcher.max_log_mb * 2**20, self._path.stat().st_size
        self._known: set[str] = set()
        self._lock = threading.Lock()
        sent = SentSteps(self._path.with_suffix(".wandb")) if once_per_step else None
        self._wandb = _WandbThread(cfg, Path(run_dir), kind, sent) if cfg.wandb.mode != "disabled" else None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append one point. NaN and infinities are written as null. A name that is not declared gives a warning."""
        warn_undeclared(self._kind, values.keys() - self._known)
        self._known |= values.keys()
        point = {name: _number(value) for name, value in values.items()}
        line = json.dumps({"step": step, "time": time.time(), **point})
        with self._lock:
            try:
                self._write(line + "\n")
            except OSError as error:  # a full disk costs a point, never a step of the run
                log.warning("event=metrics_lost file=%s error=%s", self._path, error)
        if self._wandb:
            self._wandb.put(point, step)

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
        if self._wandb:
            self._wandb.close()


def _open_lines(path: Path) -> TextIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", buffering=1)


def thin(path: Path) -> None:
    """Delete every second line of the older half. The file is replaced atomically, so that readers see a whole one."""
    half, read = path.stat().st_size // 2, 0
    with open(path, "rb") as old, replacement(path, mode=0o600) as new:
        for number, line in enumerate(old):
            read += len(line)
            if read > half or number % 2 == 0:
                new.write(line)


def drop_points_after(run_dir: Path | str, kind: str, step: int) -> int:
    """Delete the points after `step`, because a resumed trainer repeats these steps. Returns the number of steps."""
    path = Path(run_dir) / "metrics" / f"{kind}.jsonl"
    points = read_metrics(run_dir, kind)
    kept = [point for point in points if point["step"] <= step]
    if len(kept) < len(points):
        replace_file(path, "".join(json.dumps(point) + "\n" for point in kept), mode=0o600)
    return len({point["step"] for point in points if point["step"] > step})


def read_metrics(run_dir: Path | str, kind: str) -> list[dict[str, Any]]:
    """Return all points of a kind in order, without lines that are incomplete."""
    points = []
    with contextlib.suppress(FileNotFoundError):
        for line in (Path(run_dir) / "metrics" / f"{kind}.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                points.append(json.loads(line))
    return points


def _number(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


class SentSteps:
    """The newest step that wandb was given, in a file that outlives the process."""

    def __init__(self, path: Path):
        self._path = path
        text = path.read_text() if path.exists() else ""
        self._newest = int(text) if text.strip().isdecimal() else -1

    def is_new(self, step: int) -> bool:
        """Whether ``step`` is newer than all steps so far. From then on it is not."""
        if step <= self._newest:
            return False
        self._newest = step
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(f"{step:020d}\n")  # of constant length, so that no moment leaves the file empty
        return True


class _WandbThread:
    """The thread that owns the wandb run. It ends at `close` or at wandb's first error."""

    def __init__(self, cfg: Config, run_dir: Path, kind: str, sent: SentSteps | None):
        self._sent = sent
        self._points: queue.Queue[tuple[dict[str, Any], int] | None] = queue.Queue(QUEUE_POINTS)
        self._thread = threading.Thread(target=self._run, args=(cfg, run_dir, kind), name="wandb", daemon=True)
        self._thread.start()
        self._dropped = 0

    def put(self, point: dict[str, Any], step: int) -> None:
        try:
            self._points.put_nowait((point, step))
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._points.put_nowait(None)
        self._thread.join(timeout=FINISH_TIMEOUT_S)
        if self._thread.is_alive() or self._dropped:
            log.warning("event=wandb_incomplete dropped=%d note=metrics/*.jsonl is complete", self._dropped)

    def _run(self, cfg: Config, run_dir: Path, kind: str) -> None:
        try:
            run = wandb_run.start(cfg, run_dir, kind)
            while (item := self._points.get()) is not None:
                point, step = item
                if self._sent is not None and not self._sent.is_new(step):
                    continue
                run.log(
                    {f"{kind}/{name}": value for name, value in point.items() if value is not None}
                    | {f"{kind}/step": step}
                )
            run.finish()
        except Exception:  # wandb may fail, but its failure must not stop the role
            log.exception("event=wandb_failed kept=metrics/%s.jsonl", kind)
