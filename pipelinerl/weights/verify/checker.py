"""Checks during generation and training that every server samples from the weights it was sent (docs/weights.md).

Consumes: the sender's reports (which server answers, took a version, left), the trainer's scores.
Produces: `ProbeMissed`, and the verified version of each server. Waits for: servers, each with a deadline, in threads
of its own. Ends: at ``close``.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from pipelinerl.errors import TransportError, WeightUpdateError
from pipelinerl.records import CalibrationExceeded, ProbeMissed
from pipelinerl.weights.verify.calibration import Baseline, LogprobVerdict, calibrate, check_version, mean_difference
from pipelinerl.weights.verify.probe import FIRST_TIMEOUT_S, ProbeClient, ProbeText, first_tokens
from pipelinerl.weights.verify.scores import read_scores, read_version, sample_request, score_request
from pipelinerl.world import Job

log = logging.getLogger(__name__)

FROM_FILE = "default"
"""vLLM's label of weights loaded from disk."""
DUTY = 20
"""Scores are requested for at most 1 / this of the time."""
UNVERIFIED_DUTY = 4
"""The same while a server has not passed its log-probabilities."""
RETRY_S = 1.0
"""Pause before a server that did not answer is asked again."""
MAX_THREADS = 32
"""Servers that are checked at a time."""
KEPT_VERSIONS = 32
"""Versions whose checksums and scores are kept: servers are asked about a version soon after they took it."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Expected:
    """Expected checksum and scores of one version."""

    checksum: "Future[str]"
    scores: "Future[np.ndarray] | None"
    """The trainer's. None = log-probabilities are not compared for this version."""


class Inquiry(NamedTuple):
    """A version that a server is asked about."""

    version: int
    expected: Expected
    service: object | None
    """`CheckState.service` when it was asked. An answer about an earlier process says nothing about the present one."""


class LastScoring(NamedTuple):
    """When scores were last asked for, and how long the answers took."""

    ended: float = 0.0
    """Monotonic seconds."""
    seconds: float = 0.0


@dataclass(eq=False)
class CheckState:
    """State of one server."""

    server: ProbeClient
    baseline: Baseline | None = None
    has_other_file: bool = False
    """Its weights from disk differ from the trainer's, so the first update calibrates it."""
    unchecked: deque[int] = field(default_factory=deque)
    """Versions that the server took and that are not checked yet, oldest first."""
    passed: int = -1
    """Newest version that passed."""
    verified: int = -1
    """Newest version whose probe is over. All live bytes were compared, or log-probabilities too, or cannot be."""
    is_updated: bool = False
    """It has taken an update since its calibration."""
    service: object | None = None
    """Its present time in service, another object each time. None = it is out of service."""
    is_scored: bool = False
    """Its log-probabilities have passed since it last entered service."""
    misses: int = 0
    is_busy: bool = False
    """A thread is checking it."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class WeightChecker:
    """Checks the servers of one sender. Methods return at once, except for ``sample`` and ``close``.

    Args:
        tolerance: `weights.probe_tolerance`.
        timeout_s: a server in service that does not answer within this time misses its probe.
        report: called with every missed probe, from any thread.
        passed: called when ``verified`` has changed, from any thread.
        base: `base_files.base_digest` of the base that servers must have loaded, where they are sent an adapter alone.
            None = they are sent all weights.
        exceeded: called for a server that differs by more than ``tolerance`` at version 0, from any thread.
    """

    def __init__(
        self,
        *,
        secret: str,
        tolerance: float,
        timeout_s: float,
        report: Callable[[ProbeMissed], None],
        passed: Callable[[], object],
        base: str | None = None,
        exceeded: Callable[[CalibrationExceeded], object] = lambda message: None,
    ):
        self._exceeded, self._base = exceeded, base
        self._tolerance, self._timeout_s, self._report, self._passed = tolerance, timeout_s, report, passed
        self._connect = partial(ProbeClient, secret=secret, timeout_s=timeout_s)
        self._states: dict[str, CheckState] = {}
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="weight-check")
        self._text: ProbeText | None = None
        self._sampling: Future[ProbeText | None] | None = None
        self._answering: set[str] = set()
        self._expected: dict[int, Expected] = {}
        self._scoring = LastScoring()
        self._closed = threading.Event()

    def add_server(self, job: Job) -> None:
        """Adds a server that takes weights."""
        self._states[job.name] = CheckState(self._connect(job))

    def remove_server(self, name: str) -> None:
        """Removes a server that left the run."""
        self.stop_check(name)
        self._answering.discard(name)
        self._states.pop(name).server.close()

    def sample(self, shape: tuple[int, int], vocab_size: int, seed: int, timeout_s: float) -> ProbeText | None:
        """Samples a probe text from the first server that answers.

        Args:
            shape: (sequences, tokens of each).
            timeout_s: for this call. A slow server goes on sampling, and the next call waits for it.
        Returns:
            None: the text is not there yet, or no server answers.
        """
        if self._sampling is None:
            self._sampling = self._pool.submit(self._sample_from_any, shape, vocab_size, seed)
        try:
            text = self._sampling.result(timeout_s)
        except FutureTimeoutError:
            return None
        self._sampling = None
        return text

    def begin(self, text: ProbeText) -> None:
        """Starts calibrating and admitting servers with this text."""
        self._text = text

    def admits(self, name: str, label: str) -> bool:
        """Returns whether a server that reports ``label`` may be updated. Starts its calibration if that is missing."""
        state = self._states[name]
        self._answering.add(name)
        if self._text is None or state.misses > 1:
            return False
        if label != FROM_FILE or self._text.logprobs is None:
            return True
        with state.lock:
            if state.is_updated:  # it was restarted
                state.baseline, state.is_updated, state.passed = None, False, -1
                state.has_other_file = False
            if state.baseline is not None or state.has_other_file:
                return True
            if not state.is_busy:
                state.is_busy = True
                self._pool.submit(self._calibrate, state)
        return False

    def expect(self, version: int, expected: Expected) -> None:
        """Registers what servers must show for ``version``. Called before the version is sent."""
        self._expected[version] = expected
        for old in sorted(self._expected)[:-KEPT_VERSIONS]:
            del self._expected[old]

    def start_check(self, name: str, version: int) -> None:
        """Starts checking a server that took the version. A server with two misses is no longer checked."""
        state = self._states[name]
        with state.lock:
            if state.misses > 1:
                return
            state.unchecked.append(version)
            state.is_updated = True
            state.service = state.service or object()
            if state.is_busy:
                return
            state.is_busy = True
        self._pool.submit(self._check_all, state)

    def stop_check(self, name: str) -> None:
        """Stops checking a server that left service, until it takes an update."""
        state = self._states.get(name)
        if state is None:
            return
        with state.lock:
            state.unchecked.clear()
            state.is_scored, state.service, state.verified = False, None, -1

    @property
    def verified(self) -> dict[str, int]:
        """Newest version of each server whose probe is over, -1 = none."""
        return {name: state.verified for name, state in tuple(self._states.items())}

    @property
    def noise(self) -> float | None:
        """`calibration.mean_difference`, mean over the servers. None: no log-probabilities have passed yet."""
        baselines = [state.baseline for state in tuple(self._states.values()) if state.baseline is not None]
        return float(np.mean([mean_difference(one) for one in baselines])) if baselines else None

    def wants_scores(self, *, is_idle: bool) -> bool:
        """Whether the trainer should score the next version: a server is unverified, or a comparison is due."""
        if self._text is None:
            return False
        unverified = any(w.service is not None and not w.is_scored for w in tuple(self._states.values()))
        # A trainer that is not idle stands still for it.
        duty = UNVERIFIED_DUTY if unverified else DUTY if is_idle else 2 * DUTY
        return time.monotonic() - self._scoring.ended >= duty * self._scoring.seconds

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for state in self._states.values():
            state.server.close()

    def _calibrate(self, state: CheckState) -> None:
        """Measures the healthy difference of server and trainer while both hold the model's file."""
        try:
            scores, scored = self._scores(state, FROM_FILE)
            if scored.all():
                assert self._text is not None
                assert self._text.logprobs is not None
                state.baseline, verdict = calibrate(scores, self._text.logprobs, self._tolerance)
                if verdict.fault:  # the weights that it is sent may be right all the same
                    state.baseline, state.has_other_file = None, True
                    log.warning("event=calibration_exceeded server=%s %s", state.server.name, _figures(verdict))
                    self._exceeded(
                        CalibrationExceeded(
                            server=state.server.name,
                            difference=verdict.difference,
                            limit=verdict.limit,
                            timestamp=time.time(),
                        )
                    )
                log.info("event=server_calibrated server=%s %s", state.server.name, _figures(verdict))
        except Exception as error:  # noqa: BLE001 — the thread's boundary: the next answer of the server decides
            log.warning("event=server_not_calibrated server=%s error=%r", state.server.name, error)
            self._closed.wait(RETRY_S)
        self._check_all(state)  # it may have taken a version meanwhile

    def _check_all(self, state: CheckState) -> None:
        """Checks the versions that the server took, in order. A last one without expectations counts as verified."""
        deadline = time.monotonic() + self._timeout_s
        while not self._closed.is_set():
            with state.lock:
                if not state.unchecked:
                    state.is_busy = False
                    return
                version = state.unchecked.popleft()
                expected = self._expected.get(version)
                if expected is None:
                    state.verified = state.verified if state.unchecked else version
                    continue
                question = Inquiry(version, expected, state.service)
            try:
                fault = self._fault(state, question)
                deadline = time.monotonic() + self._timeout_s
            except WeightUpdateError as error:  # of a trainer rank, so the next version's probe decides
                deadline = time.monotonic() + self._timeout_s
                log.warning("event=probe_undecided server=%s version=%d error=%s", state.server.name, version, error)
                continue
            except Exception as error:  # noqa: BLE001 — the thread's boundary: whatever the server made of its answer
                if state.service is not question.service:
                    continue
                if time.monotonic() < deadline:
                    self._closed.wait(RETRY_S)
                    with state.lock:
                        if state.service is question.service:
                            state.unchecked.appendleft(version)
                    continue
                reason = f"{type(error).__name__}: {error}"
                fault = f"did not answer its probe within weights.timeout_s={self._timeout_s:g}: {reason}"
            if fault and state.service is question.service:
                self._miss(state, version, fault)

    def _fault(self, state: CheckState, question: Inquiry) -> str:
        """Returns the reason why the server does not use the version. Empty if it does or nothing can be decided."""
        version, expected, _ = question
        check = state.server.compare(version)
        if self._base is not None and check.base != self._base:
            return f"its base is another one: digest {check.base[:16]!r} of its files instead of {self._base[:16]!r}"
        if check.differing:
            more = f" and {len(check.differing) - 1} more" if len(check.differing) > 1 else ""
            return f"{check.differing[0]}{more} are not the bytes that it received"
        if check.is_checked and check.checksum and check.checksum != self._wait_for_trainer(expected.checksum):
            return f"received other bytes: checksum {check.checksum} instead of {expected.checksum.result()}"
        passed = check.is_checked and not check.unlearned and (self._base is None or not state.has_other_file)
        if passed:
            self._mark_verified(state, question)  # beyond the bytes, log-probabilities are asked of few versions
        if expected.scores is not None:
            verdict = self._judge(state, version, expected.scores)
            if verdict is not None:
                log.info("event=server_scored server=%s version=%d %s", state.server.name, version, _figures(verdict))
            if verdict is not None and verdict.fault:
                return f"{verdict.fault}: {_figures(verdict)}"
            passed = passed or verdict is not None
        if passed or check.is_checked:  # else the next version's probe decides: its bytes are arriving
            self._mark_verified(state, question, passed=passed)
        log.debug("event=attested server=%s version=%d passed=%s", state.server.name, version, passed)
        return ""

    def _wait_for_trainer(self, future: "Future[Made]") -> Made:
        """Waits for what the trainer makes of a version.

        Raises:
            WeightUpdateError: it failed, or is not there in time, which is no fault of the server.
        """
        try:
            return future.result(self._timeout_s)
        except Exception as error:
            raise WeightUpdateError(
                f"the trainer has not said what it must show: {type(error).__name__}: {error}"
            ) from error

    def _mark_verified(self, state: CheckState, question: Inquiry, *, passed: bool = False) -> None:
        """Ends the probe of a version, unless the server has left since or has taken it once more.

        ``passed``: nothing of the version is left to be asked.
        """
        with state.lock:
            if state.service is not question.service:
                return
            if passed:
                state.passed = max(state.passed, question.version)
                state.misses = 0 if state.is_scored else state.misses
            if state.verified >= question.version or question.version in state.unchecked:
                return
            state.verified = question.version
        self._passed()

    def _judge(self, state: CheckState, version: int, scores: "Future[np.ndarray]") -> LogprobVerdict | None:
        """Compares log-probabilities, twice if they miss. Returns None if the server changed its version too early."""
        trainer = self._wait_for_trainer(scores)
        verdict = None
        for _ in range(2):
            server, scored = self._scores(state, str(version))
            if not (scored.any() if state.baseline else scored.all()):
                return None
            if state.baseline is None:
                baseline, verdict = calibrate(server, trainer, self._tolerance)
            else:
                baseline, verdict = check_version(state.baseline, server, trainer, scored)
            if not verdict.fault:
                state.baseline, state.is_scored = baseline, True
                return verdict
        return verdict

    def _miss(self, state: CheckState, version: int, reason: str) -> None:
        with state.lock:
            state.misses += 1
        self.stop_check(state.server.name)
        miss = ProbeMissed(
            server=state.server.name,
            version=version,
            since=state.passed + 1,
            is_final=state.misses > 1,
            reason=reason,
            timestamp=time.time(),
        )
        log.error(
            "event=probe_missed server=%s version=%d final=%s reason=%s", miss.server, version, miss.is_final, reason
        )
        self._report(miss)

    def _scores(self, state: CheckState, label: str) -> tuple[np.ndarray, np.ndarray]:
        """Scores the text, one sequence at a time, until an answer comes from other weights than those of ``label``.

        Returns (float32 [S·(L−1)] scores, bool of that shape: whether the token was scored).
        """
        assert self._text is not None
        rows = self._text.token_ids
        scores = np.zeros((len(rows), rows.shape[1] - 1), dtype=np.float32)
        scored = np.zeros(scores.shape, dtype=bool)
        started = time.monotonic()
        first = int(label) if label.isdecimal() else 0
        for number in np.roll(np.arange(len(rows)), -first):
            body = state.server.score(score_request(rows[number]))
            if read_version(body) != label:
                break
            scores[number], scored[number] = read_scores(body, rows[number])[1:], True
        ended = time.monotonic()
        self._scoring = LastScoring(ended, ended - started)
        return scores.ravel(), scored.ravel()

    def _sample_from_any(self, shape: tuple[int, int], vocab_size: int, seed: int) -> ProbeText | None:
        for name in sorted(self._answering):
            try:
                rows = self._sample(self._states[name], first_tokens(vocab_size, shape[0], seed), shape[1] - 1, seed)
                return ProbeText(token_ids=np.array(rows, dtype=np.int32))
            except Exception as error:  # noqa: BLE001 — the thread's boundary: the next server is asked
                log.warning("event=probe_not_sampled server=%s error=%r", name, error)
        return None

    def _sample(self, state: CheckState, firsts: Sequence[int], count: int, seed: int) -> list[list[int]]:
        """Samples ``count`` tokens after each first one, all at once: nobody else uses the server yet."""

        def row(number: int, first: int) -> list[int]:
            body = state.server.score(sample_request(first, count, seed + number), FIRST_TIMEOUT_S)
            (choice,) = msgspec.json.decode(body)["choices"]
            if len(choice["token_ids"]) != count:
                raise TransportError(f"{len(choice['token_ids'])} of {count} tokens were sampled")
            return [first, *choice["token_ids"]]

        return list(self._pool.map(row, range(len(firsts)), firsts))


def _figures(verdict: LogprobVerdict) -> str:
    followed = "" if verdict.followed is None else f", {verdict.followed:.2f} of the trainer's change"
    return f"{verdict.difference:.3g} nats, {verdict.limit:.3g} are allowed{followed}"
