"""Reports on the running actor: its metrics, its progress line in the log, and the current wait in its status."""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from pipelinerl.actor.metrics import ActorMetrics
from pipelinerl.observability.catalogue import ActorMetric, MetricName
from pipelinerl.records import EvaluationDone

log = logging.getLogger(__name__)

SHOWN = (
    ActorMetric.ROLLOUTS,
    ActorMetric.ROLLOUTS_PER_S,
    ActorMetric.TOKENS_GENERATED_PER_S,
    ActorMetric.REWARD,
    ActorMetric.SUCCESS,
    ActorMetric.ROLLOUTS_UNDER_WAY,
)


class Status(Protocol):
    """The part of the role's status that the actor writes."""

    def progress(self, **fields: Any) -> None: ...
    def waiting(self, what: str, on: str | None = None) -> contextlib.AbstractContextManager: ...


class MetricsLog(Protocol):
    """Where metrics are written: ``observability.metrics.MetricsLogger``."""

    def log(self, values: dict[MetricName, float], *, step: int) -> None: ...


class Reporter:
    """Writes metrics every ``every_s`` seconds and shows what the actor waits for."""

    def __init__(
        self,
        metrics: ActorMetrics,
        metrics_log: MetricsLog,
        status: Status,
        every_s: float,
    ):
        self._metrics, self._metrics_log, self._status, self._every_s = metrics, metrics_log, status, every_s
        self._next = time.monotonic() + every_s
        self._waits_for: tuple[str, str] | None = None
        self._wait = contextlib.ExitStack()

    def progress(self, **fields: Any) -> None:
        """Shows fields in the role's status."""
        self._status.progress(**fields)

    def wait_for(self, what: str, on: str) -> None:
        """Shows the current wait: ``what``, and the job that it is ``on``. Does nothing if it is unchanged."""
        if self._waits_for != (what, on):
            self.stop_waiting()
            self._waits_for = (what, on)
            self._wait.enter_context(self._status.waiting(what, on=on))

    def stop_waiting(self) -> None:
        self._wait.close()
        self._waits_for = None

    def log(self, numbers: Callable[[], dict[MetricName, float]], step: int, *, force: bool = False) -> None:
        """Writes the metrics and the progress line if they are due, or always with ``force``.

        Args:
            numbers: returns further metrics.
            step: live weight version.
        """
        now = time.monotonic()
        if now < self._next and not force:
            return
        self._next = now + self._every_s
        values = self._metrics.snapshot(now) | numbers()
        self._metrics_log.log(values, step=step)
        log.info("event=progress %s", " ".join(f"{key}={_short(values[key])}" for key in SHOWN if key in values))

    def evaluation(self, done: EvaluationDone) -> None:
        """Writes the metrics of an evaluation."""
        self._metrics_log.log(evaluation_metrics(done), step=done.version)


def evaluation_metrics(done: EvaluationDone) -> dict[MetricName, float]:
    """An evaluation's metrics: over all its rollouts, and of each data set."""
    values: dict[MetricName, float] = {}
    if done.success is not None and done.reward is not None:
        values |= {ActorMetric.EVAL_SUCCESS: done.success, ActorMetric.EVAL_REWARD: done.reward}
    for name, value in done.metrics.items():
        dataset, _, metric = name.rpartition("/")
        of_dataset = ActorMetric.EVAL_OF_DATASET.of(dataset=dataset, metric=metric)
        values[of_dataset if dataset else ActorMetric.EVAL_COMPLETE] = value
    return values


def _short(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) else f"{value:.3f}"
