"""When weights go out: initially, after every due step, at the end, never during an evaluation.

Gathering sharded parameters is collective, so every rank calls every method; what goes out is decided on rank 0, which
alone has a ``Publisher``. A version that an evaluation holds back is deferred; at the lease's end the newest goes out.
"""

import logging
import time
from collections.abc import Callable

import torch

from pipelinerl.config.sections import Config
from pipelinerl.errors import DeadlineError
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.export import exported_parameters, exported_specs
from pipelinerl.finetune.model import Tokens
from pipelinerl.finetune.publish import Publisher
from pipelinerl.observability.status import RoleStatus
from pipelinerl.weights.probe import Probe, probe_tokens

log = logging.getLogger(__name__)

POLL_S = 0.2


def is_push_due(step: int, interval: int, max_train_steps: int) -> bool:
    """Whether the weights after ``step`` optimizer steps go out: every ``interval`` steps and at the end."""
    return step % interval == 0 or step == max_train_steps


def push_interval(cfg: Config) -> int:
    """Optimizer steps per update: a phase of the conventional schedule, else `finetune.weight_update_interval`."""
    return cfg.steps_per_phase if cfg.schedule == "conventional" else cfg.finetune.weight_update_interval


def last_needed(step: int, cfg: Config) -> int:
    """The last step whose data must be there before ``step`` is trained: a phase is generated whole, then trained."""
    if step % cfg.steps_per_phase:
        return step
    return min(step + cfg.steps_per_phase, cfg.finetune.max_train_steps) - 1


def make_probe(engine: Engine, cfg: Config) -> Probe:
    """What servers must answer with the trainer's present weights. Collective."""
    ids = probe_tokens(engine.policy.lm.config.get_text_config().vocab_size, cfg.seed)
    tokens = torch.tensor(ids, device=engine.device)
    positions = torch.arange(len(ids), device=engine.device)
    scored = engine.evaluate(Tokens(tokens[None], positions[None], tokens.roll(-1)))
    logprobs = scored.float().roll(1).cpu().numpy()
    return Probe(token_ids=ids, logprobs=logprobs, tolerance=cfg.weights.probe_tolerance)


class WeightUpdates:
    """The trainer's weight updates, on every rank."""

    def __init__(
        self,
        engine: Engine,
        cfg: Config,
        dtype: torch.dtype,
        publisher: Publisher | None,
        status: RoleStatus,
        stop: Callable[[], bool],
    ):
        """``publisher``: on rank 0 only."""
        self._engine, self._cfg, self._dtype = engine, cfg, dtype
        self._publisher, self._status, self._stop = publisher, status, stop
        self.deferred = False
        """An update is due that an evaluation held back; equal on all ranks."""

    def start(self, version: int, num_servers: int, resumed: bool) -> None:
        """Give the servers the weights that training starts from, and wait until they are live.

        A new run waits for every server. A resumed one needs one: the others may be restarting and come back later.
        """
        timeout_s = self._cfg.launcher.startup_timeout_s
        deadline = time.monotonic() + timeout_s
        if self._publisher is not None:
            with self._status.waiting("inference servers to start", on="actor_llm"):
                needed, up = (1 if resumed else num_servers), 0
                while not self._stop() and (up := self._publisher.wait_for_servers(needed, POLL_S)) < needed:
                    if time.monotonic() > deadline:
                        raise DeadlineError(
                            f"{needed - up} of {needed} awaited inference servers did not answer within "
                            f"launcher.startup_timeout_s={timeout_s:g}; see actor_llm_*/log.txt in the run folder"
                        )
        self._send_when_allowed(version)

    def after_step(self, step: int) -> float:
        """Send the new version if it is due; returns the seconds that the previous update made rank 0 wait."""
        if not is_push_due(step, push_interval(self._cfg), self._cfg.finetune.max_train_steps):
            return 0.0
        return self._send_or_defer(step)

    def retry(self, step: int) -> None:
        """Send the version that was held back, if the evaluation has ended."""
        if self.deferred:
            self._send_or_defer(step)

    def finish(self, step: int) -> bool:
        """Wait until the last weights are live; False when asked to stop before."""
        return self._send_when_allowed(step) if self.deferred else self._wait_live(step)

    def _send_or_defer(self, version: int) -> float:
        held = self._publisher is not None and self._publisher.held(version)
        self.deferred = bool(self._engine.broadcast_object(held))
        return 0.0 if self.deferred else self._send(version)

    def _send(self, version: int) -> float:
        probe = make_probe(self._engine, self._cfg) if self._cfg.weights.probe else None
        parameters = exported_parameters(self._engine, self._dtype)
        if self._publisher is not None:
            with self._status.waiting("the previous weight update", on="actor_llm"):
                return self._publisher.begin(version, parameters, exported_specs(self._engine, self._dtype), probe)
        for _ in parameters:
            pass
        return 0.0

    def _send_when_allowed(self, version: int) -> bool:
        self._send_or_defer(version)
        with self._status.waiting("the evaluation to end", on="actor"):
            while self.deferred:
                if self._engine.broadcast_object(self._stop()):
                    return False
                time.sleep(POLL_S)
                self._send_or_defer(version)
        return self._wait_live(version)

    def _wait_live(self, version: int) -> bool:
        live = True
        if self._publisher is not None:
            with self._status.waiting(f"version {version} to be live", on="actor_llm"):
                while not (live := self._publisher.wait_live(version, POLL_S)) and not self._stop():
                    pass
        return bool(self._engine.broadcast_object(live))
