"""Weight updates beside training: at most one push in flight, the newest version wins while an evaluation holds it.

Consumes: snapshots offered by the training loop, evaluation leases on topic `evaluation`.
Produces: weight updates on the servers, and on topic `trainer` a `WeightUpdateSuccess` for each.
Waits for: the servers (bounded by `weights.timeout_s` each), an evaluation's end (bounded by its deadline).
Ends: at ``close``, or with the first error, which the training loop sees at its next call.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipelinerl.records import EvaluationDone, EvaluationStarted, WeightUpdateSuccess

log = logging.getLogger(__name__)

POLL_S = 0.05

Snapshot = dict[str, Tensor]
"""Whole parameters under the names and in the dtype the servers load; not touched by training."""


class Report(Protocol):
    """What a push tells."""

    servers: tuple[str, ...]
    pause_ms: tuple[float, ...]
    transfer_ms: float
    errors: dict[str, str]


class EvaluationLease:
    """Whether an evaluation forbids changing the servers' weights, from the messages of topic `evaluation`."""

    def __init__(self, poll: Callable[[], Sequence[object]], clock: Callable[[], float] = time.time):
        """``poll`` returns the messages that arrived since its last call."""
        self._poll, self._clock = poll, clock
        self._open: EvaluationStarted | None = None

    def held(self) -> bool:
        """True while a started evaluation has neither ended nor expired."""
        for message in self._poll():
            if isinstance(message, EvaluationStarted):
                self._open = message
            elif isinstance(message, EvaluationDone) and self._open and message.version == self._open.version:
                self._open = None
        if self._open and self._clock() >= self._open.deadline:
            log.warning("evaluation lease expired version=%d", self._open.version)
            self._open = None
        return self._open is not None


@dataclass(frozen=True, kw_only=True)
class PushStats:
    """Totals since the start of the process."""

    updates: int = 0
    version: int = -1
    """Newest live version."""
    servers: tuple[str, ...] = ()
    pause_ms_mean: float = 0.0
    transfer_ms: float = 0.0


class Publisher:
    """Pushes offered snapshots from its own thread."""

    def __init__(
        self,
        push: Callable[[int, Snapshot], Report],
        announce: Callable[[WeightUpdateSuccess], object],
        lease: EvaluationLease,
        attend: Callable[[int, Snapshot], Report | None] = lambda version, snapshot: None,
    ):
        """``push`` sends a snapshot to the servers in service; ``attend`` re-admits servers that came back, giving them
        the live snapshot, and returns a report when the set in service changed."""
        self._push, self._announce, self._lease, self._attend = push, announce, lease, attend
        self._condition = threading.Condition()
        self._pending: tuple[int, Snapshot] | None = None
        self._live: tuple[int, Snapshot] | None = None
        self._in_flight = False
        self._held = False
        self._error: BaseException | None = None
        self._closed = False
        self.stats = PushStats()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def offer(self, version: int, snapshot: Snapshot) -> None:
        """Make ``version`` the next to go out; replaces a version that is still held back."""
        with self._condition:
            self._raise_error()
            self._pending = (version, snapshot)
            self._condition.notify_all()

    def wait_ready(self) -> None:
        """Return when no push is in flight or due: offering now delays nobody. A held push does not count."""
        self._wait(lambda: not self._in_flight and (self._pending is None or self._held))

    def wait_live(self, version: int, timeout_s: float | None = None) -> bool:
        """Return True when ``version`` (or a newer one) is live."""
        return self._wait(lambda: self.stats.version >= version, timeout_s)

    @property
    def holding(self) -> bool:
        """Whether an evaluation holds a version back right now."""
        return self._held

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        with self._condition:
            done = self._condition.wait_for(lambda: condition() or self._error or self._closed, timeout_s)
            self._raise_error()
            return bool(done)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._update(*job)
        except Exception as error:  # handed to the training loop, which ends the role with it
            with self._condition:
                self._error = error
                self._condition.notify_all()

    def _next(self) -> tuple[int, Snapshot] | None:
        """The next version to push; None at the end. Between pushes, looks after servers that came back."""
        while True:
            held = self._lease.held()
            with self._condition:
                if self._closed:
                    return None
                if held != self._held:
                    self._held = held
                    self._condition.notify_all()
                if self._pending and not held:
                    job, self._pending, self._in_flight = self._pending, None, True
                    return job
            if not held and self._live and (report := self._attend(*self._live)) is not None:
                self._record(self._live[0], report)
            with self._condition:
                if not self._closed and (held or not self._pending):
                    self._condition.wait(POLL_S)

    def _update(self, version: int, snapshot: Snapshot) -> None:
        report = self._push(version, snapshot)
        self._live = (version, snapshot)
        self._record(version, report)

    def _record(self, version: int, report: Report) -> None:
        for server, error in report.errors.items():
            log.error("server out of service server=%s version=%d reason=%s", server, version, error)
        self._announce(
            WeightUpdateSuccess(
                version=version,
                servers=tuple(report.servers),
                pause_ms=tuple(report.pause_ms),
                transfer_ms=report.transfer_ms,
                timestamp=time.time(),
            )
        )
        pauses = report.pause_ms
        with self._condition:
            self.stats = PushStats(
                updates=self.stats.updates + 1,
                version=version,
                servers=tuple(report.servers),
                pause_ms_mean=sum(pauses) / len(pauses) if pauses else 0.0,
                transfer_ms=report.transfer_ms,
            )
            self._in_flight = False
            self._condition.notify_all()
