"""The actor's main loop connects the trainer's state, the work table, training groups and evaluations.

Consumes: the trainer's state (version, servers, end), the preprocessor's drops, the workers' results.
Produces: ``RolloutGroup`` or ``GroupDropped`` for every dispatched problem on topic ``actor``, and evaluations on
``evaluation`` and ``actor_test``.
Ends: when training is done and the last evaluation is published, when asked to stop, or with a ``DomainError``.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pipelinerl.actor import failures
from pipelinerl.actor.evaluation import Evaluator, TestWork
from pipelinerl.actor.groups import TrainingGroup, TrainingGroups
from pipelinerl.actor.messages import Failure, GroupFinished, Servers
from pipelinerl.actor.metrics import ActorMetrics, Reporter
from pipelinerl.actor.work import Work, WorkTable
from pipelinerl.membership.lease import LiveServer
from pipelinerl.observability.catalogue import ActorMetric, MetricName
from pipelinerl.records import ProbeMissed
from pipelinerl.records.drops import DropReason

log = logging.getLogger(__name__)

MIN_POLL_S, MAX_POLL_S = 0.005, 0.05
"""Bounds of the wait for workers. A new version or server is noticed after the second at the latest."""


class TrainerView(Protocol):
    """The part of ``state.TrainerState`` that the loop reads."""

    @property
    def weights(self) -> tuple[int | None, Mapping[str, int]]: ...
    @property
    def verified(self) -> Mapping[str, int]: ...
    @property
    def training_done(self) -> bool: ...
    def take_misses(self) -> Sequence[ProbeMissed]: ...


class ActorLoop:
    """State of the actor between polls. Used by one thread.

    Args:
        live: returns this actor's servers with a valid lease, by name.
    """

    def __init__(
        self,
        *,
        trainer: TrainerView,
        live: Callable[[], Mapping[str, LiveServer]],
        table: WorkTable,
        training: TrainingGroups,
        evaluator: Evaluator,
        domain_errors: failures.DomainErrors,
        metrics: ActorMetrics,
        reporter: Reporter,
    ):
        self._trainer, self._live, self._table = trainer, live, table
        self._training, self._evaluator = training, evaluator
        self._domain_errors, self._metrics, self._reporter = domain_errors, metrics, reporter
        self._version: int | None = None
        self._servers = Servers(version=0, urls={}, serving={})
        self._last_event = time.monotonic()
        self._finishing = False

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Runs until training is done or ``should_stop`` returns true."""
        self._reporter.progress()  # ready: the first weights are the trainer's to bring
        try:
            while not should_stop() and not self._ended():
                self._refresh()
                self._dispatch()
                self._metrics.generating(time.monotonic(), self._table.runs(TrainingGroup), self._share_held())
                for work, ended in self._table.poll(self._poll_timeout_s()):
                    self._last_event = time.monotonic()
                    self._handle_ended(work, ended)
                if self._training.publish_in_turn():
                    self._reporter.progress(published=self._training.published)
                if (done := self._evaluator.finish()) is not None:
                    self._reporter.progress(evaluating=None)
                    self._reporter.evaluation(done)
                self._name_wait()
                self._reporter.log(self._numbers, self._version or 0)
        finally:
            self._reporter.stop_waiting()
            self._reporter.log(self._numbers, self._version or 0, force=True)

    def _ended(self) -> bool:
        """Whether training and the last evaluation have ended. The end of training cancels the training groups."""
        if not self._trainer.training_done:
            return False
        if not self._finishing:
            self._finishing = True
            self._training.give_up()
        self._refresh()
        return not self._evaluator.is_running and not self._evaluator.is_due(self._version, finishing=True)

    def _refresh(self) -> None:
        """Adopts the trainer's newest version and servers."""
        verified = self._trainer.verified  # before the misses: else a server that missed would pass for an unprobed one
        self._withdraw_missed()
        version, serving = self._trainer.weights
        if version is None:
            return
        self._table.gate.follow(serving=serving, verified=verified, now=time.monotonic())
        servers = self._usable(version, serving)
        if self._version is not None and servers == self._servers:
            return
        self._version, self._servers = version, servers
        self._last_event = time.monotonic()
        self._table.set_servers(servers)
        self._reporter.progress(version=version, servers=list(servers.urls))
        self._evaluator.move_to(version)

    def _withdraw_missed(self) -> None:
        """Withdraws servers that missed a weight probe, even if they are back already, and repeats what used them."""
        misses = self._trainer.take_misses()
        if not misses:
            return
        for miss in misses:
            self._table.misses.add(miss.server, miss.since)
        missed = {miss.server for miss in misses}
        serving = {name: served for name, served in self._servers.serving.items() if name not in missed}
        self._servers = self._usable(self._version or 0, serving)
        self._table.set_servers(self._servers)
        for failure in (*self._training.refuse(misses), *self._evaluator.refuse()):
            self._note(failure)

    def _usable(self, version: int, serving: Mapping[str, int]) -> Servers:
        """Combines versions, which the trainer reports, with URLs and rooms, which are in the servers' leases."""
        live = self._live()
        urls = {name: live[name].job.url for name in serving if name in live}
        return Servers(
            version=version,
            urls=urls,
            serving={name: serving[name] for name in urls},
            draining=tuple(name for name in urls if live[name].is_draining),
            capacities={name: room for name in urls if (room := live[name].capacity) is not None},
        )

    # Dispatch

    def _dispatch(self) -> None:
        if self._version is None or not self._servers.urls:
            return
        if not self._evaluator.is_running and self._evaluator.is_due(self._version, self._finishing):
            self._evaluator.start(self._version)
        self._evaluator.fill()
        if not self._finishing and self._training.may_start(self._version):
            self._reporter.stop_waiting()  # if a user's sampler takes long, nobody else is to blame
            self._training.fill(self._version)

    def _share_held(self) -> float:
        """Share of the servers' room that the bound on the lag keeps empty. In an evaluation no newer version comes."""
        if self._version is None or self._finishing or self._evaluator.is_running:
            return 0.0
        return self._training.share_held(self._version)

    def _handle_ended(self, work: Work, ended: GroupFinished) -> None:
        self._metrics.aborted(ended.aborted_requests)
        for failure in ended.failures:
            self._note(failure)
        if isinstance(work, TestWork):
            self._evaluator.handle_ended(work, ended)
            if ended.rollouts:
                self._reporter.progress(evaluating=self._evaluator.progress)
        else:
            self._training.handle_ended(work, ended)

    def _note(self, failure: Failure) -> None:
        self._metrics.failure(failure.reason, failure.server)
        if failure.reason in failures.OF_THE_DOMAIN:
            log.error("event=rollout_failed reason=%s detail=%s", failure.reason, failure.detail)
            self._domain_errors.add(failure.detail)
        elif failure.reason != DropReason.POISONOUS:  # the worker's death is in the log
            log.warning("event=rollout_failed reason=%s detail=%s", failure.reason, failure.detail)

    def _name_wait(self) -> None:
        if self._version is None:
            self._reporter.wait_for("the first weights", "finetune_0")
        elif not self._servers.urls:
            self._reporter.wait_for("a server in service", "finetune_0")
        elif self._training.awaits_check or self._evaluator.awaits_check:
            self._reporter.wait_for("weight probes of the servers of finished rollouts", "finetune_0")
        elif self._training.holds_groups:
            self._reporter.wait_for("completions of the domain that is behind its weight", self._a_server)
        elif len(self._table):
            self._reporter.wait_for("completions", self._a_server)
        else:
            self._reporter.wait_for("room under max_lag_steps", "finetune_0")

    def _poll_timeout_s(self) -> float:
        """How long to wait for workers before checking the trainer's state again: a tenth of the quiet time."""
        if self._training.awaits_check:  # the trainer's message about it does not end the wait
            return MIN_POLL_S
        return min(MAX_POLL_S, max(MIN_POLL_S, (time.monotonic() - self._last_event) / 10))

    @property
    def _a_server(self) -> str:
        return next(iter(self._servers.urls))

    def _numbers(self) -> dict[MetricName, float]:
        return self._training.numbers() | {
            ActorMetric.ROLLOUTS_UNDER_WAY: self._table.num_rollouts,
            ActorMetric.VERSION: self._version if self._version is not None else -1,
            ActorMetric.DOMAIN_ERRORS: self._domain_errors.count,
        }
