"""Weight updates beside training: one in flight at a time, announced when live, none during an evaluation.

Consumes: versions begun by the training loop, evaluation leases on topic `evaluation`, servers that come back.
Produces: weight updates through the `WeightSender`, and a `WeightUpdateSuccess` for each on topic `trainer`.
Waits for: nothing itself; every push of the sender has its own deadline.
Ends: at ``close``, or with the first error, which the training loop sees at its next call; when no server is left that
uses what it is sent, that is such an error.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from pipelinerl.errors import ServersExpelledError, WeightUpdateError
from pipelinerl.records import EvaluationDone, EvaluationStarted, ProbeMissed, WeightUpdateSuccess
from pipelinerl.weights.attestor import Miss
from pipelinerl.weights.probe import ProbeText
from pipelinerl.weights.protocol import ParamSpec

log = logging.getLogger(__name__)

IDLE_S = 0.05
PUSHING_S = 0.002


class Report(Protocol):
    """What one push did."""

    @property
    def version(self) -> int: ...
    @property
    def servers(self) -> tuple[str, ...]: ...
    @property
    def pause_ms(self) -> tuple[float, ...]: ...
    @property
    def transfer_ms(self) -> float: ...
    @property
    def errors(self) -> dict[str, str]: ...


class Sender(Protocol):
    """The part of `pipelinerl.weights.sender.WeightSender` that is used here."""

    @property
    def returning(self) -> tuple[str, ...]: ...
    def send_async(
        self,
        version: int,
        params: Iterable[tuple[str, Tensor]],
        metadata: Sequence[ParamSpec],
        scores: "Future[np.ndarray] | None" = None,
    ) -> None: ...
    @property
    def wants_scores(self) -> bool: ...
    @property
    def is_exhausted(self) -> bool: ...
    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int) -> ProbeText | None: ...
    def attest_with(self, text: ProbeText) -> None: ...
    def take_misses(self) -> Sequence[Miss]: ...
    def readmit_async(self) -> bool: ...
    @property
    def is_pushing(self) -> bool: ...
    @property
    def is_done(self) -> bool: ...
    def wait(self) -> Report: ...
    def close(self) -> None: ...


class EvaluationLease:
    """Whether an evaluation forbids changing the servers' weights, from the messages of topic `evaluation`."""

    def __init__(self, poll: Callable[[], Sequence[object]], clock: Callable[[], float] = time.time):
        """``poll`` returns the messages that arrived since its last call."""
        self._poll, self._clock = poll, clock
        self._open: EvaluationStarted | None = None
        self._lock = threading.Lock()

    def held(self, version: int) -> bool:
        """True while an evaluation has neither ended nor expired, unless it is one of ``version`` itself."""
        with self._lock:
            for message in self._poll():
                if isinstance(message, EvaluationStarted):
                    self._open = message
                elif isinstance(message, EvaluationDone) and self._open and message.version == self._open.version:
                    self._open = None
            if self._open and self._clock() >= self._open.deadline:
                log.warning("evaluation lease expired version=%d", self._open.version)
                self._open = None
            return self._open is not None and self._open.version != version


@dataclass(frozen=True, kw_only=True)
class PushStats:
    """What is live, and what the last update cost."""

    version: int = -1
    """Newest live version."""
    servers: tuple[str, ...] = ()
    """Servers that hold it."""
    updates: int = 0
    pause_ms: float = 0.0
    """Mean over the servers."""
    transfer_ms: float = 0.0


class Publisher:
    """Rank 0's side of the weight updates; a thread collects reports and takes back servers that return."""

    def __init__(
        self,
        sender: Sender,
        announce: Callable[[WeightUpdateSuccess | ProbeMissed], object],
        lease: EvaluationLease,
    ):
        self._sender, self._announce, self._lease = sender, announce, lease
        self._condition = threading.Condition(threading.RLock())
        self._error: Exception | None = None
        self._closed = False
        self._last_miss = ""
        self.stats = PushStats()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def held(self, version: int) -> bool:
        """Whether an evaluation forbids an update to ``version`` now; a resumed trainer may send the evaluated one."""
        self._raise_error()
        return self._lease.held(version)

    def check(self) -> None:
        """Raise the error that ended the updates, if one did."""
        self._raise_error()

    @property
    def wants_scores(self) -> bool:
        """Whether the next version's log-probabilities should be compared."""
        return self._sender.wants_scores

    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int, timeout_s: float) -> ProbeText | None:
        """A text for the probe from the first server that answers within ``timeout_s``, else None."""
        deadline = time.monotonic() + timeout_s
        while (text := self._sender.sample_text(shape, vocab_size, seed)) is None and time.monotonic() < deadline:
            time.sleep(IDLE_S)
        return text

    def attest_with(self, text: ProbeText) -> None:
        """Servers count as up when they are calibrated on this text."""
        self._sender.attest_with(text)

    def wait_for_servers(self, count: int, timeout_s: float) -> int:
        """Wait until ``count`` servers answer or the time is up; returns how many do."""
        deadline = time.monotonic() + timeout_s
        while (up := len(self._sender.returning)) < count and time.monotonic() < deadline:
            time.sleep(IDLE_S)
        return up

    def begin(
        self,
        version: int,
        parameters: Iterable[tuple[str, Tensor]],
        specs: Sequence[ParamSpec],
        scores: "Future[np.ndarray] | None" = None,
    ) -> float:
        """Start an update; return when the parameters are copied: the seconds it first waited for the previous one."""
        started = time.perf_counter()
        with self._condition:
            self._condition.wait_for(lambda: not self._sender.is_pushing or self._error)
            self._raise_error()
            waited = time.perf_counter() - started
            self._sender.send_async(version, parameters, specs, scores)
            self._condition.notify_all()
        return waited

    def wait_live(self, version: int, timeout_s: float) -> bool:
        """Whether ``version`` or a newer one is on a server within ``timeout_s``."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_live(version) or self._error, timeout_s)
            self._raise_error()
            return self._is_live(version)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()
        self._sender.close()

    def _is_live(self, version: int) -> bool:
        return self.stats.version >= version and bool(self.stats.servers)

    def _raise_error(self) -> None:
        if isinstance(self._error, ServersExpelledError):
            raise self._error
        if self._error is not None:
            raise WeightUpdateError(f"weight updates ended: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while not self._closed:
                self._look_after()
        except Exception as error:  # handed to the training loop, which ends the role with it
            with self._condition:
                self._error = error
                self._condition.notify_all()

    def _look_after(self) -> None:
        """Collect a finished push, or start one for servers that came back; then rest a moment."""
        self._announce_misses()
        if self._sender.is_pushing and self._sender.is_done:
            self._record(self._sender.wait())
            return
        with self._condition:
            if not self._sender.is_pushing and self.stats.version >= 0:
                self._sender.readmit_async()  # also during an evaluation: its version is the one that is sent again
        with self._condition:
            if not self._closed:
                self._condition.wait(PUSHING_S if self._sender.is_pushing else IDLE_S)

    def _announce_misses(self) -> None:
        """Tell everybody at once who failed; the message about who serves follows with the next push."""
        for miss in self._sender.take_misses():
            self._last_miss = f"{miss.server}: version {miss.version} {miss.reason}"
            self._announce(
                ProbeMissed(
                    server=miss.server,
                    version=miss.version,
                    since=miss.since,
                    is_final=miss.is_final,
                    reason=miss.reason,
                    timestamp=time.time(),
                )
            )
        if self._sender.is_exhausted:
            raise ServersExpelledError(
                f"no inference server is left: each missed its weight probe twice. The last one was {self._last_miss}. "
                "The figures of the others are in this log. If the servers are healthy, raise weights.probe_tolerance"
            )

    def _record(self, report: Report) -> None:
        for server, error in report.errors.items():
            log.error("server out of service server=%s version=%d reason=%s", server, report.version, error)
        pauses = tuple(report.pause_ms)
        self._announce(
            WeightUpdateSuccess(
                version=report.version,
                servers=tuple(report.servers),
                pause_ms=pauses,
                transfer_ms=report.transfer_ms,
                timestamp=time.time(),
            )
        )
        with self._condition:
            self.stats = PushStats(
                version=report.version,
                servers=tuple(report.servers),
                updates=self.stats.updates + 1,
                pause_ms=sum(pauses) / len(pauses) if pauses else 0.0,
                transfer_ms=report.transfer_ms,
            )
            self._condition.notify_all()
