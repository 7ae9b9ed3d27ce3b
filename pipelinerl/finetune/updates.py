"""Decides when weights are sent to the servers: at the start, after every due step (not in an evaluation), at the end.

Every rank calls every method, because gathering is collective. Rank 0 decides. A version is deferred while an
evaluation runs or servers still pull the previous one; only the newest is then sent.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipelinerl.config.sections import Config
from pipelinerl.config.servers import max_model_len, sends_adapter
from pipelinerl.errors import DeadlineError
from pipelinerl.finetune.adapter import adapter_parameters, adapter_specs
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.export import exported_parameters, exported_specs
from pipelinerl.finetune.model import DTYPES, Tokens
from pipelinerl.observability import spans
from pipelinerl.observability.status import RoleStatus
from pipelinerl.records import EvaluationDone, EvaluationStarted
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.weights.publish.announcements import Announcement, PushStats
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.verify.probe import MAX_LENGTH, ProbeText, text_shape

log = logging.getLogger(__name__)

T = TypeVar("T")


class EvaluationLease:
    """Follows topic `evaluation` to find out whether the servers' weights may change."""

    def __init__(self, poll: Callable[[], Sequence[object]], clock: Callable[[], float] = time.time):
        """``poll`` returns the messages since its last call. ``clock`` returns seconds since 1970."""
        self._poll, self._clock = poll, clock
        self._open: EvaluationStarted | None = None

    def held(self, version: int) -> bool:
        """Whether an evaluation of another version than ``version`` has neither ended nor expired."""
        for message in self._poll():
            if isinstance(message, EvaluationStarted):
                self._open = message
            elif isinstance(message, EvaluationDone) and self._open and message.version == self._open.version:
                self._open = None
        if self._open and self._clock() >= self._open.deadline:
            log.warning("event=evaluation_lease_expired version=%d", self._open.version)
            self._open = None
        return self._open is not None and self._open.version != version


POLL_S = 0.2
"""Wait for servers after which the ranks agree again whether to stop."""
BUSY_POLL_S = 0.005
"""Training stands still meanwhile."""


Announce = Callable[[Announcement], object]
"""Writes a message to topic `trainer`."""


class StripeHolder(Protocol):
    """The methods of `pipelinerl.weights.publish.origin.Origin` used here."""

    def take_snapshot(
        self,
        version: int,
        params: Iterable[tuple[str, Tensor]],
        specs: Sequence[ParamSpec],
        plan: SnapshotPlan,
    ) -> object: ...
    def close(self) -> None: ...


class Sender(Protocol):
    """The methods of `pipelinerl.weights.publish.sender.WeightSender` used here. Each may raise the sender's error."""

    @property
    def stats(self) -> PushStats: ...
    @property
    def is_busy(self) -> bool: ...
    def wants_scores(self, *, is_idle: bool) -> bool: ...
    def check(self) -> None: ...
    def plan(self) -> SnapshotPlan: ...
    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int, timeout_s: float) -> ProbeText | None: ...
    def check_with(self, text: ProbeText) -> None: ...
    @property
    def num_answering(self) -> int: ...
    def wait_for_servers(self, count: int, timeout_s: float) -> int: ...
    def send(
        self,
        version: int,
        params: Iterable[tuple[str, Tensor]],
        specs: Sequence[ParamSpec],
        scores: "Future[np.ndarray] | None" = None,
        plan: SnapshotPlan | None = None,
    ) -> None: ...
    def wait_live(self, version: int, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


def is_push_due(step: int, interval: int, max_train_steps: int) -> bool:
    """Whether the weights after ``step`` optimizer steps are sent: every ``interval`` steps and after the last."""
    return step % interval == 0 or step == max_train_steps


def push_interval(cfg: Config) -> int:
    """Optimizer steps per update: a phase in the conventional schedule, else `finetune.weight_update_interval`."""
    return cfg.steps_per_phase if cfg.schedule == "conventional" else cfg.finetune.weight_update_interval


def last_needed(step: int, cfg: Config) -> int:
    """The last step whose data must arrive before ``step`` is trained. A phase is generated whole, then trained."""
    if step % cfg.steps_per_phase:
        return step
    return min(step + cfg.steps_per_phase, cfg.finetune.max_train_steps) - 1


def score_text(engine: Engine, text: ProbeText) -> np.ndarray:
    """float32 [S·(L−1)]: log-probabilities of the probe's text under the trainer's current weights. Collective."""
    ids = torch.from_numpy(text.token_ids).long().to(engine.device)
    rows, length = ids.shape
    positions = torch.arange(length, device=engine.device).repeat(rows)
    scored_N = engine.evaluate(Tokens(ids.reshape(1, -1), positions[None], ids.roll(-1, 1).flatten()))
    return scored_N.float().view(rows, length)[:, :-1].flatten().cpu().numpy()


class WeightUpdates:
    """The trainer's weight updates, on every rank."""

    def __init__(
        self,
        engine: Engine,
        cfg: Config,
        origin: StripeHolder,
        sender: Sender | None,
        lease: EvaluationLease | None,
        status: RoleStatus,
        stop: Callable[[], bool],
        run_dir: Path,
    ):
        """``origin`` is this rank's end. On rank 0 ``sender`` uses it, on the others ``sender`` and ``lease`` are None.

        ``stop`` returns whether the role was asked to stop.
        """
        self._engine, self._cfg, self._dtype = engine, cfg, DTYPES[cfg.finetune.dtype]
        self._sends_adapter = sends_adapter(cfg)
        self._origin, self._sender, self._lease = origin, sender, lease
        self._status, self._stop = status, stop
        self._run_dir = run_dir
        self._text: ProbeText | None = None
        self.deferred = False
        """Whether a due update could not be sent yet. Equal on all ranks."""
        self.idle_s = 0.0
        """Seconds in which the last ``after_step`` scored the probe while there were no data to train on."""

    def start(self, version: int, num_servers: int, resumed: bool) -> None:
        """Send the servers the weights of ``version``, from which training starts, and wait until they are live.

        A new run waits for all ``num_servers``. An evaluation that began before a resume does not hold these weights
        back, because the version that it needs may be lost.

        Raises:
            DeadlineError: servers did not answer within `launcher.startup_timeout_s`. Those that have may be slow.
        """
        deadline = time.monotonic() + self._cfg.launcher.startup_timeout_s
        # In a resumed run the others may be restarting and join later.
        needed = 1 if resumed else num_servers
        if self._cfg.weights.probe:
            with self._status.waiting("the first text of an inference server", on="actor_llm"):
                self._prepare_probe(version, deadline)
        with self._status.waiting("inference servers to start", on="actor_llm"):

            def all_there(sender: Sender) -> bool | None:
                if sender.wait_for_servers(needed, POLL_S) >= needed:
                    return True
                self._check_start(sender, deadline, needed)
                return None

            self._ask_until(all_there)
        self._send_when_allowed(version, at_start=True)

    def _ask_until(self, ask: Callable[[Sender], T | None]) -> T | None:
        """Retries until rank 0 has an answer. None: the role was asked to stop. Collective.

        Ranks meet at each try, because a wait for servers in one collective ends at the time-out of collectives.
        """
        while True:
            found = None if self._sender is None else ask(self._sender)
            found, is_over = self._engine.broadcast_object((found, found is not None or self._stop()))
            if is_over:
                return found

    def _check_start(self, sender: Sender, deadline: float, needed: int) -> None:
        if (missing := needed - sender.num_answering) > 0 and time.monotonic() > deadline:
            raise DeadlineError(
                f"{missing} of {needed} awaited inference servers did not answer within "
                f"launcher.startup_timeout_s={self._cfg.launcher.startup_timeout_s:g}; "
                "see actor_llm_*/log.txt in the run folder"
            )

    def _prepare_probe(self, version: int, deadline: float) -> None:
        """Load the probe's text from the run folder, or sample it and score it with the weights of version 0."""
        vocab_size = self._engine.policy.lm.config.get_text_config().vocab_size
        shape = text_shape(max_model_len(self._cfg) or MAX_LENGTH)

        def sampled(sender: Sender) -> ProbeText | None:
            text = sender.sample_text(shape, vocab_size, self._cfg.seed, POLL_S)
            if text is None:
                self._check_start(sender, deadline, 1)
            return text

        loaded = self._engine.broadcast_object(ProbeText.load(self._run_dir) if self._sender is not None else None)
        text: ProbeText | None = loaded if loaded is not None else self._ask_until(sampled)
        if text is None:
            return
        if loaded is None and version == 0:
            text = text.with_scores(score_text(self._engine, text))
        if self._sender is not None:
            if loaded is None:
                text.save(self._run_dir)
            self._sender.check_with(text)
        self._text = text

    def after_step(self, step: int, has_data: Callable[[], bool]) -> float:
        """Send version ``step`` if an update is due and allowed. Returns the seconds in which training stood still.

        Args:
            has_data: whether the next step could be trained now. If not, the probe is scored meanwhile (``idle_s``).
                Scores after which it could are counted in full, because it is unknown when the data came.
        """
        self.idle_s = 0.0
        due = is_push_due(step, push_interval(self._cfg), self._cfg.finetune.max_train_steps)
        if not due and not self.deferred:
            return 0.0
        started = time.perf_counter()
        scoring_s = self._send_or_defer(step, has_data)
        if scoring_s and not has_data():
            self.idle_s = scoring_s
        return time.perf_counter() - started - self.idle_s

    def retry(self, step: int) -> None:
        """Send a deferred update, if sending is allowed now, with the weights of version ``step``.

        Raises:
            ServersExpelledError: no server is left.
        """
        if self._sender is not None:
            self._sender.check()
        if self.deferred:
            self._send_or_defer(step)

    def finish(self, step: int) -> bool:
        """Wait until the last weights are live. False when asked to stop before."""
        return self._send_when_allowed(step) if self.deferred else self._wait_live(step)

    def _send_or_defer(
        self, version: int, has_data: Callable[[], bool] = lambda: False, *, at_start: bool = False
    ) -> float:
        """Returns the seconds in which the probe was scored. Other ranks wait for rank 0's data, so it decides."""
        plan, scored = None, False
        if self._sender is not None and self._lease is not None:
            held = not at_start and self._lease.held(version)
            plan = None if self._sender.is_busy or held else self._sender.plan()
            if plan is not None and self._text is not None and self._sender.wants_scores(is_idle=True):
                scored = self._sender.wants_scores(is_idle=False) or not has_data()
        plan, scored = self._engine.broadcast_object((plan, scored))
        self.deferred = plan is None
        return 0.0 if plan is None else self._send(version, scored, plan)

    @cached_property
    def _specs(self) -> list[ParamSpec]:
        specs = adapter_specs if self._sends_adapter else exported_specs
        return specs(self._engine, self._dtype)

    def _send(self, version: int, scored: bool, plan: SnapshotPlan) -> float:
        """Send first, then score the probe: servers are asked for their scores only once they hold the version.

        Returns the seconds in which the probe was scored.
        """
        exported = adapter_parameters if self._sends_adapter else exported_parameters
        parameters = exported(self._engine, self._dtype)
        specs = self._specs
        scores: Future[np.ndarray] = Future()
        if self._sender is not None:
            began = time.time_ns()
            self._sender.send(version, parameters, specs, scores if scored else None, plan)
            spans.record("snapshot", f"version {version}", began, root=True, version=version)
        else:
            self._origin.take_snapshot(version, parameters, specs, plan)
        if not scored:
            return 0.0
        assert self._text is not None
        started = time.perf_counter()
        scores.set_result(score_text(self._engine, self._text))
        return time.perf_counter() - started

    def _send_when_allowed(self, version: int, *, at_start: bool = False) -> bool:
        self._send_or_defer(version, at_start=at_start)
        with self._status.waiting("the evaluation or the update before to end", on="actor"):
            while self.deferred:
                if self._engine.broadcast_object(self._stop()):
                    return False
                time.sleep(BUSY_POLL_S)
                self._send_or_defer(version, at_start=at_start)
        return self._wait_live(version)

    def _wait_live(self, version: int) -> bool:
        with self._status.waiting(f"version {version} to be live", on="actor_llm"):
            return bool(self._ask_until(lambda sender: sender.wait_live(version, POLL_S) or None))
