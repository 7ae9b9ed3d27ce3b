"""Experiment trackers (`tracker`): wandb, TensorBoard and trackio, each through its own library, several at once.

A tracker runs in a thread of its own behind a bounded queue, where its library is imported. A slow, missing or failing
one loses points but never delays a step. `metrics/*.jsonl` has every point.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.sections import Config

log = logging.getLogger(__name__)

QUEUE_POINTS = 10_000
"""Longest queue: hours of steps while a tracker's server is away."""
FINISH_TIMEOUT_S = 5.0
"""A role's end waits no longer for a tracker."""

TRACKERS = {
    "wandb": "pipelinerl.observability.wandb.WandbTracker",
    "tensorboard": "pipelinerl.observability.tensorboard.TensorBoardTracker",
    "trackio": "pipelinerl.observability.trackio.TrackioTracker",
}
"""Classes by name. Each takes the configuration, the run folder and the kind of the role."""
WITH_TEXT = ("wandb", "trackio")
"""Trackers that also take alerts and tables."""


class Tracker(Protocol):
    """One kind of role's run in a tracker."""

    def log(self, point: Mapping[str, float], step: int) -> None:
        """Add a point. Names carry the role: `finetune/loss`."""
        ...

    def alert(self, title: str, text: str) -> None: ...

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...

    def keep(self, path: Path) -> None:
        """Keep a file as an artefact of the run, if the tracker has artefacts."""
        ...

    def finish(self) -> None: ...


class TrackerThread:
    """The thread that owns a tracker. It ends at `close` or at the tracker's first error. ``name``: in ``TRACKERS``."""

    def __init__(self, name: str, cfg: Config, run_dir: Path, kind: str):
        self._name = name
        self._work: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUE_POINTS)
        self._thread = threading.Thread(target=self._run, args=(cfg, run_dir, kind), name=name, daemon=True)
        self._dropped = 0
        self._thread.start()

    def put(self, work: Callable[[Tracker], None]) -> None:
        """Do ``work`` with the tracker in its thread. Dropped if the queue is full."""
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._work.put_nowait(None)
        self._thread.join(timeout=FINISH_TIMEOUT_S)
        if self._thread.is_alive() or self._dropped:
            log.warning("event=tracker_incomplete tracker=%s dropped=%d kept=metrics/", self._name, self._dropped)

    def _run(self, cfg: Config, run_dir: Path, kind: str) -> None:
        try:
            tracker: Tracker = resolve_function(TRACKERS[self._name])(cfg, run_dir, kind)
            while (work := self._work.get()) is not None:
                work(tracker)
            tracker.finish()
        except Exception:  # a tracker may fail, but its failure must not stop the role
            log.exception("event=tracker_failed tracker=%s kept=metrics/%s.jsonl", self._name, kind)
