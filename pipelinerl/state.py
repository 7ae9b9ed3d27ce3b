"""A role's view of the trainer: newest weight version, servers in service, totals, and whether training is done.

A thread reads topic ``trainer`` from its oldest record. If it dies, every property and wait raises ``StreamError`` with
the cause, so that no role continues with outdated state.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pipelinerl.errors import DeadlineError, StreamError
from pipelinerl.records.messages import (
    ProbeMissed,
    ProbePassed,
    SamplesProcessed,
    TrainerMessage,
    TrainingDone,
    TrainingResumed,
    WeightUpdateSuccess,
)
from pipelinerl.records.topics import TRAINER
from pipelinerl.streams import SingleStreamSpec, open_reader

T = TypeVar("T")

_POLL_S = 0.5
"""Longest delay of ``stop``. Records arrive without it."""


@dataclass(eq=False)
class _Servers:
    """The servers in service, as in the newest ``WeightUpdateSuccess``."""

    version: int | None = None
    serving: dict[str, int] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)


class TrainerState:
    """Follows the trainer of the run in ``exp_path``.

    Example:
        state = TrainerState(run_dir)
        state.start_listening()
        version = state.wait_for_model_version(timeout_s=600)
    """

    def __init__(self, exp_path: str | Path, *, last_step: int = 0):
        """
        Args:
            exp_path: run folder.
            last_step: optimizer step that ends training. It may be later than the step of a recorded end, because a
                finished run can be extended.
        """
        self.exp_path = Path(exp_path)
        self._last_step = last_step
        self._changed = threading.Condition()
        self._servers = _Servers()
        self._misses: list[ProbeMissed] = []
        self._samples: int | None = None
        self._steps: int | None = None
        self._resumed: TrainingResumed | None = None
        self._done = False
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def propagated_weight_version(self) -> int | None:
        """Newest version that a server serves. None before the first update."""
        return self._read(lambda: self._servers.version)

    @property
    def servers(self) -> tuple[str, ...]:
        """Job names of the servers in service. No other server may be used."""
        return self._read(lambda: tuple(self._servers.serving))

    @property
    def weights(self) -> tuple[int | None, dict[str, int]]:
        """``propagated_weight_version``, and the version that each server in service serves."""
        return self._read(lambda: (self._servers.version, dict(self._servers.serving)))

    @property
    def verified(self) -> dict[str, int]:
        """Newest version with which each server in service was verified (``WeightUpdateSuccess.proved``)."""
        return self._read(lambda: dict(self._servers.verified))

    def take_misses(self) -> list[ProbeMissed]:
        """Returns the weight probes that servers missed since the last call, in order."""
        with self._changed:
            self._raise_failure()
            misses, self._misses = self._misses, []
        return misses

    @property
    def resumed(self) -> TrainingResumed | None:
        """Where the trainer resumed at its last start. None if it began at step 0 or has not begun."""
        return self._read(lambda: self._resumed)

    @property
    def samples_processed(self) -> int | None:
        """Rollouts trained since the start of the run. None before the first optimizer step."""
        return self._read(lambda: self._samples)

    @property
    def steps_done(self) -> int | None:
        """Optimizer steps since the start of the run. None before the first one."""
        return self._read(lambda: self._steps)

    @property
    def training_done(self) -> bool:
        """Whether the trainer has reached its last step and its last weights are live."""
        return self._read(lambda: self._done)

    def start_listening(self) -> None:
        """Starts the thread. May be called only once."""
        assert self._thread is None, "TrainerState listens already"
        self._thread = threading.Thread(target=self._listen, name="trainer-state", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def wait_for_model_version(self, timeout_s: float | None = None) -> int:
        """Waits until servers hold a version and returns it. Raises ``DeadlineError`` after ``timeout_s``, if given."""
        if not self._wait(lambda: self._servers.version is not None, timeout_s):
            raise DeadlineError(self._late("its first weight update", timeout_s))
        assert self._servers.version is not None
        return self._servers.version

    def wait_for_processed_samples(self, timeout_s: float | None = None) -> int:
        """Waits for the first optimizer step and returns the number of rollouts trained. Raises ``DeadlineError``."""
        if not self._wait(lambda: self._samples is not None, timeout_s):
            raise DeadlineError(self._late("its first optimizer step", timeout_s))
        assert self._samples is not None
        return self._samples

    def wait_for_training_done(self, timeout: float | None = None) -> bool:
        """Waits up to ``timeout`` seconds (None: without limit) and returns whether training is done."""
        return self._wait(lambda: self._done, timeout)

    def _read(self, value: Callable[[], T]) -> T:
        with self._changed:
            self._raise_failure()
            return value()

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                self._raise_failure()
                assert self._thread is not None, "call start_listening() before waiting for the trainer"
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return False
                self._changed.wait(remaining)
        return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise StreamError(f"the listener on topic {TRAINER} died: {self._failure}") from self._failure

    def _late(self, what: str, timeout_s: float | None) -> str:
        log = self.exp_path / "finetune_0" / "log.txt"
        return f"nothing about {what} from finetune_0 within {timeout_s} s; see {log}"

    def _listen(self) -> None:
        """Reads trainer messages until ``stop`` or a failure. The next property or wait raises the failure."""
        try:
            spec = SingleStreamSpec(self.exp_path, TRAINER)
            # name=None: this reader protects no records from deletion
            with open_reader(spec, TrainerMessage, name=None, over_damage=True) as reader:
                while not self._stop.is_set():
                    for _, message in reader.poll(_POLL_S):
                        self._apply(message)
        except Exception as error:  # noqa: BLE001 — the thread's boundary
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _apply(self, message: TrainerMessage) -> None:
        with self._changed:
            match message:
                case WeightUpdateSuccess():
                    serving = dict.fromkeys(message.servers, message.version) | message.older
                    self._servers = _Servers(message.version, serving, dict(message.proved))
                case ProbePassed():
                    verified = self._servers.verified
                    verified |= {name: version for name, version in message.proved.items() if name in verified}
                case ProbeMissed():
                    self._misses.append(message)
                    self._servers.serving.pop(message.server, None)
                    self._servers.verified.pop(message.server, None)
                case TrainingResumed():
                    self._resumed = message
                    if message.step:
                        self._samples = max(message.samples_processed, self._samples or 0)
                        self._steps = max(message.step, self._steps or 0)
                case SamplesProcessed():
                    self._samples, self._steps = message.samples_processed, message.step
                case TrainingDone() if message.step >= self._last_step:
                    self._done = True
            self._changed.notify_all()
