"""The actor's main loop: when something may start it starts, what is whole is published, what fails is tried again.

Consumes: the trainer's news (version, servers, end), the preprocessor's drops, the workers' results.
Produces: ``RolloutGroup`` or ``GroupDropped`` for every dispatched problem on topic ``actor``; evaluations on
``evaluation`` and ``actor_test``.
Waits for: a version and a server, room under the pacing rule, completions (of several domains: also of the one that is
furthest behind its weight, see ``mixing``); each named in the role's status.
Ends: when training is done and the last evaluation is published, when asked to stop, or with a ``DomainError``.
"""

import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipelinerl.actor import failures
from pipelinerl.actor.evaluation import Evaluation, TestItem, TestProblem
from pipelinerl.actor.lag import Pacing
from pipelinerl.actor.messages import Failure, GroupFinished, Servers, StartGroup
from pipelinerl.actor.metrics import ActorMetrics
from pipelinerl.actor.mixing import counted, furthest_behind
from pipelinerl.actor.problems import Place
from pipelinerl.actor.progress import Progress
from pipelinerl.actor.workers import Lost
from pipelinerl.errors import DomainError, RecordTooLarge
from pipelinerl.records import ActorRecord, EvaluationStarted, GroupDropped, Rollout, RolloutGroup
from pipelinerl.records.messages import EvaluationMessage

log = logging.getLogger(__name__)

MIN_POLL_S, MAX_POLL_S = 0.005, 0.05


class Trainer(Protocol):
    """What the loop reads of ``state.TrainerState``."""

    @property
    def weights(self) -> tuple[int | None, tuple[str, ...]]: ...
    @property
    def training_done(self) -> bool: ...


class Workers(Protocol):
    """What the loop needs of ``workers.WorkerPool``."""

    @property
    def num_rollouts(self) -> int: ...
    def set_servers(self, servers: Servers) -> None: ...
    def start(self, start: StartGroup) -> None: ...
    def cancel(self, ticket: int) -> None: ...
    def poll(self, timeout_s: float) -> Sequence[GroupFinished | Lost]: ...


class Drops(Protocol):
    """What the loop knows of the samples that the preprocessor dropped."""

    def total(self) -> int: ...
    def by_domain(self) -> Mapping[str, int]: ...


class Status(Protocol):
    """What the loop tells its role's status."""

    def progress(self, **fields: Any) -> None: ...
    def waiting(self, what: str, on: str | None = None) -> contextlib.AbstractContextManager: ...


@dataclass(frozen=True, kw_only=True)
class TrainDomain:
    """A domain's training problems."""

    name: str
    weight: float
    problems: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the loop takes from the configuration."""

    attempts: int
    llm_max_rollouts: int
    max_failed_rollouts_per_group: int
    max_group_reissues: int
    max_domain_errors: int
    eval_every_n_versions: int
    eval_at_start: bool
    eval_at_end: bool
    eval_attempts: int
    eval_timeout_s: float
    log_every_s: float


@dataclass(eq=False)
class _Work:
    """A piece of work at the workers: a training group or a test item."""

    start: StartGroup
    place: Place | None = None
    item: TestItem | None = None
    dispatch_index: int = -1
    rollouts: list[Rollout] = field(default_factory=list)
    reissues: int = 0
    suspect: bool = False


class ActorLoop:
    """State of the actor between polls. One thread."""

    def __init__(
        self,
        *,
        limits: Limits,
        pacing: Pacing,
        domains: Sequence[TrainDomain],
        test_problems: Sequence[TestProblem],
        urls: dict[str, str],
        trainer: Trainer,
        workers: Workers,
        drops: Drops,
        publish: Callable[[ActorRecord], int],
        publish_test: Callable[[RolloutGroup], int],
        announce: Callable[[EvaluationMessage], int],
        log_metrics: Callable[[dict[str, float], int], None],
        status: Status,
        should_stop: Callable[[], bool],
        progress: Progress,
        save: Callable[[], None],
        last_evaluation: EvaluationMessage | None = None,
    ):
        self._limits, self._pacing, self._domains = limits, pacing, domains
        self._weights = [domain.weight for domain in domains]
        self._test_problems, self._urls = test_problems, urls
        self._trainer, self._workers, self._drops = trainer, workers, drops
        self._publish, self._publish_test, self._announce = publish, publish_test, announce
        self._log_metrics, self._status, self._should_stop = log_metrics, status, should_stop
        self._progress, self._save = progress, save
        self._version: int | None = None
        self._servers: tuple[str, ...] | None = None
        self._works: dict[int, _Work] = {}
        self._suspects: list[_Work] = []
        self._next_ticket = 0
        self._last_event = time.monotonic()
        self._under_way: Counter[int] = Counter()
        self._held: list[deque[_Work]] = [deque() for _ in domains]
        self._domain_errors = 0
        self._evaluation: Evaluation | None = None
        self._last_evaluation = last_evaluation
        self._finishing = False
        self._metrics = ActorMetrics(time.monotonic())
        self._next_log = time.monotonic() + limits.log_every_s
        self._wait = _NamedWait(status)

    def run(self) -> None:
        """Until training is done or a stop is asked for."""
        try:
            while not self._should_stop() and not self._ended():
                self._refresh()
                self._dispatch()
                self._metrics.generating(time.monotonic(), any(work.item is None for work in self._works.values()))
                for result in self._workers.poll(poll_timeout_s(time.monotonic() - self._last_event)):
                    self._last_event = time.monotonic()
                    self._take(result)
                self._publish_in_turn()
                self._finish_evaluation()
                self._name_wait()
                self._log()
        finally:
            self._wait.clear()
            self._log(force=True)

    def _ended(self) -> bool:
        """Once training is done: give up training groups, evaluate the last version, end."""
        if not self._trainer.training_done:
            return False
        if not self._finishing:
            self._finishing = True
            self._cancel(lambda work: work.item is None)
            self._held = [deque() for _ in self._domains]
        self._refresh()
        return self._evaluation is None and not self._evaluation_due()

    def _refresh(self) -> None:
        """Takes the trainer's newest version and servers."""
        version, names = self._trainer.weights
        if version is None:
            return
        servers = tuple(name for name in names if name in self._urls)
        if (version, servers) == (self._version, self._servers):
            return
        self._version, self._servers = version, servers
        self._last_event = time.monotonic()
        self._workers.set_servers(Servers(version=version, urls={name: self._urls[name] for name in servers}))
        self._status.progress(version=version, servers=list(servers))
        if self._evaluation is not None and self._evaluation.version != version:
            log.info("evaluation begins again version=%d was=%d", version, self._evaluation.version)
            self._cancel(lambda work: work.item is not None)
            self._evaluation.restart(version)
            self._announce(self._evaluation.started())

    # Dispatch

    def _dispatch(self) -> None:
        if self._version is None or not self._servers:
            return
        if self._evaluation is None and self._evaluation_due():
            self._start_evaluation()
        while self._evaluation is not None and self._has_slots(self._limits.eval_attempts):
            item = self._evaluation.next_item()
            if item is None:
                break
            self._start_test(item)
        while not self._finishing and self._has_slots(self._limits.attempts) and self._may_start():
            self._start_group()

    def _has_slots(self, attempts: int) -> bool:
        capacity = len(self._servers or ()) * self._limits.llm_max_rollouts
        running = self._workers.num_rollouts
        return running == 0 or running + attempts <= capacity

    def _may_start(self) -> bool:
        assert self._version is not None
        progress = self._progress
        dropped = progress.dropped + self._drops.total()
        return self._pacing.may_start(dispatched=progress.dispatched, dropped=dropped, version=self._version)

    def _start_group(self) -> None:
        assert self._version is not None
        counts = [count + self._under_way[i] for i, count in enumerate(self._counted())]
        index = furthest_behind(self._weights, counts, range(len(counts)))
        domain = self._domains[index]
        place = self._progress.sources[domain.name].take()
        if self._progress.epoch_began:
            self._save()
        attempts = self._limits.attempts
        start = StartGroup(
            ticket=self._ticket(),
            group_id=self._group_id(domain, place),
            domain=index,
            problem=domain.problems[place.problem_index],
            attempts=tuple(range(attempts)),
            evaluation=False,
            version=self._version,
        )
        work = _Work(start=start, place=place, dispatch_index=self._progress.dispatch(attempts))
        self._under_way[index] += attempts
        self._submit(work)

    def _counted(self) -> list[float]:
        """Samples of each domain that were published and not dropped since."""
        progress, dropped = self._progress, self._drops.by_domain()
        return [
            counted(
                settled=progress.settled_by_domain[domain.name],
                published=progress.by_domain[domain.name],
                dropped_later=dropped.get(domain.name, 0),
            )
            for domain in self._domains
        ]

    def _group_id(self, domain: TrainDomain, place: Place) -> str:
        prefix = f"{domain.name}-" if len(self._domains) > 1 else ""
        return f"{prefix}{place.epoch}-{place.position}"

    def _start_test(self, item: TestItem) -> None:
        assert self._evaluation is not None
        problem = item.problem
        version = self._evaluation.version
        start = StartGroup(
            ticket=self._ticket(),
            group_id=f"test-{version}-{problem.dataset}-{problem.index}",
            domain=problem.domain,
            problem=problem.problem,
            attempts=item.attempts,
            evaluation=True,
            version=version,
        )
        self._submit(_Work(start=start, item=item))

    def _submit(self, work: _Work) -> None:
        self._works[work.start.ticket] = work
        self._workers.start(work.start)

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _cancel(self, chosen: Callable[[_Work], bool]) -> None:
        for ticket in [ticket for ticket, work in self._works.items() if chosen(work)]:
            del self._works[ticket]
            self._workers.cancel(ticket)
        self._suspects = [work for work in self._suspects if not chosen(work)]

    # Results

    def _take(self, result: GroupFinished | Lost) -> None:
        if isinstance(result, Lost):
            self._take_lost(result)
            return
        self._metrics.aborted(result.aborted_requests)
        work = self._works.pop(result.ticket, None)
        if work is None:
            return
        for failure in result.failures:
            self._note_failure(failure)
        if work.item is not None:
            self._take_test(work, result)
        else:
            work.rollouts.extend(result.rollouts)
            self._take_group(work, result.failures)
        self._release_suspect(work)

    def _take_lost(self, lost: Lost) -> None:
        """A worker died: what it had is tried again, one suspect at a time, so that the guilty problem is found."""
        for ticket in lost.tickets:
            work = self._works.pop(ticket, None)
            if work is None:
                continue
            detail = f"the worker process ended with exit code {lost.exit_code} during this group"
            failed = tuple(
                Failure(attempt=attempt, reason=failures.POISONOUS, detail=detail) for attempt in work.start.attempts
            )
            for failure in failed:
                self._metrics.failure(failure.reason)
            self._release_suspect(work)
            work.suspect = True
            if work.item is not None:
                if self._evaluation is not None:
                    self._evaluation.take(work.item, (), worth_repeating=True)
            else:
                self._take_group(work, failed)

    def _release_suspect(self, work: _Work) -> None:
        """The suspect that ran alone has ended: the next one may run."""
        if work.suspect:
            work.suspect = False
            running = any(other.suspect for other in self._works.values())
            if self._suspects and not running:
                self._submit(self._suspects.pop(0))

    def _note_failure(self, failure: Failure) -> None:
        self._metrics.failure(failure.reason)
        if failure.reason != failures.DOMAIN:
            log.warning("rollout failed reason=%s detail=%s", failure.reason, failure.detail)
            return
        self._domain_errors += 1
        log.error("rollout failed reason=%s detail=%s", failure.reason, failure.detail)
        if self._domain_errors > self._limits.max_domain_errors:
            raise DomainError(
                f"{self._domain_errors} rollouts failed in the domain's code, "
                f"more than actor.max_domain_errors={self._limits.max_domain_errors}; the last: {failure.detail}"
            )

    def _take_group(self, work: _Work, failed: Sequence[Failure]) -> None:
        """Publishes the group, tries its missing members again, or drops it with the reason."""
        if len(failed) <= self._limits.max_failed_rollouts_per_group and work.rollouts:
            self._held[work.start.domain].append(work)
            return
        worst = next((f for f in failed if f.reason not in failures.WORTH_REPEATING), failed[0])
        if worst.reason in failures.WORTH_REPEATING and work.reissues < self._limits.max_group_reissues:
            self._reissue(work, tuple(sorted(failure.attempt for failure in failed)))
            return
        self._drop_group(work, worst)

    def _reissue(self, work: _Work, attempts: tuple[int, ...]) -> None:
        self._metrics.retried()
        work.reissues += 1
        start = work.start
        work.start = StartGroup(
            ticket=self._ticket(),
            group_id=start.group_id,
            domain=start.domain,
            problem=start.problem,
            attempts=attempts,
            evaluation=False,
            version=start.version,
        )
        if work.suspect and any(other.suspect for other in self._works.values()):
            self._suspects.append(work)
        else:
            self._submit(work)

    def _publish_in_turn(self) -> None:
        """Publishes what is whole, as long as no domain that is further behind has groups under way."""
        while any(self._held):
            under_way = [i for i, samples in self._under_way.items() if samples]
            index = furthest_behind(self._weights, self._counted(), under_way)
            if not self._held[index]:
                return
            self._publish_group(self._held[index].popleft())

    def _publish_group(self, work: _Work) -> None:
        rollouts = tuple(sorted(work.rollouts, key=lambda rollout: rollout.attempt))
        group = RolloutGroup(**self._identity(work), rollouts=rollouts, dispatched_version=work.start.version)
        try:
            self._settle(work, group)
        except RecordTooLarge as error:
            self._drop_group(work, Failure(attempt=0, reason=failures.TOO_LARGE, detail=str(error)))
            return
        domain = self._domains[work.start.domain].name
        self._metrics.rollouts(rollouts, domain if len(self._domains) > 1 else _dataset_of(work.start.problem))
        self._status.progress(published=self._progress.published)

    def _drop_group(self, work: _Work, failure: Failure) -> None:
        self._settle(work, GroupDropped(**self._identity(work), reason=failure.reason, detail=failure.detail))
        self._metrics.dropped(failure.reason)
        log.warning("group dropped id=%s reason=%s detail=%s", work.start.group_id, failure.reason, failure.detail)

    def _settle(self, work: _Work, record: RolloutGroup | GroupDropped) -> None:
        self._publish(record)
        self._progress.apply(record)
        self._under_way[work.start.domain] -= self._limits.attempts

    def _identity(self, work: _Work) -> dict[str, Any]:
        assert work.place is not None
        return {
            "group_id": work.start.group_id,
            "epoch": work.place.epoch,
            "position": work.place.position,
            "problem_index": work.place.problem_index,
            "actor": self._pacing.actor,
            "domain": self._domains[work.start.domain].name,
            "dataset": _dataset_of(work.start.problem),
            "attempts": self._limits.attempts,
            "settled_before": self._progress.before,
            "dispatch_index": work.dispatch_index,
        }

    # Evaluation

    def _evaluation_due(self) -> bool:
        if not self._test_problems or self._version is None:
            return False
        last, limits = self._last_evaluation, self._limits
        if isinstance(last, EvaluationStarted):
            return True
        if self._finishing:
            return limits.eval_at_end and (last is None or last.version < self._version)
        if last is None and limits.eval_at_start:
            return True
        every = limits.eval_every_n_versions
        return every > 0 and self._version >= (last.version if last else 0) + every

    def _start_evaluation(self) -> None:
        assert self._version is not None
        self._evaluation = Evaluation(
            problems=self._test_problems,
            attempts=self._limits.eval_attempts,
            version=self._version,
            deadline=time.time() + self._limits.eval_timeout_s,
            max_repeats=self._limits.max_group_reissues,
        )
        self._announce(self._evaluation.started())
        log.info("evaluation started version=%d problems=%d", self._version, len(self._test_problems))

    def _take_test(self, work: _Work, result: GroupFinished) -> None:
        evaluation = self._evaluation
        assert work.item is not None
        if evaluation is None:
            return
        repeat = all(failure.reason in failures.WORTH_REPEATING for failure in result.failures)
        evaluation.take(work.item, result.rollouts, worth_repeating=repeat)
        problem = work.item.problem
        if result.rollouts:
            self._status.progress(evaluating=evaluation.version)
            self._publish_test(
                RolloutGroup(
                    group_id=work.start.group_id,
                    epoch=0,
                    position=problem.index,
                    problem_index=problem.index,
                    actor=self._pacing.actor,
                    domain=self._domains[problem.domain].name,
                    dataset=problem.dataset,
                    attempts=self._limits.eval_attempts,
                    rollouts=result.rollouts,
                    dispatched_version=evaluation.version,
                    settled_before=0,
                    dispatch_index=-1,
                )
            )

    def _finish_evaluation(self) -> None:
        evaluation = self._evaluation
        if evaluation is None or not (evaluation.finished or evaluation.expired):
            return
        self._cancel(lambda work: work.item is not None)
        done = evaluation.done()
        self._announce(done)
        self._last_evaluation, self._evaluation = done, None
        log.info(
            "evaluation done version=%d success=%.4f reward=%.4f rollouts=%d complete=%.3f",
            *(done.version, done.success, done.reward, done.num_rollouts, done.metrics["complete"]),
        )
        values = {"eval/success": done.success, "eval/reward": done.reward}
        self._log_metrics(values | {f"eval/{k}": v for k, v in done.metrics.items()}, done.version)

    # Reporting

    def _name_wait(self) -> None:
        if self._version is None:
            self._wait.set("the first weights", "finetune_0")
        elif not self._servers:
            self._wait.set("a server in service", "finetune_0")
        elif any(self._held):
            self._wait.set("completions of the domain that is behind its weight", self._servers[0])
        elif self._works:
            self._wait.set("completions", self._servers[0])
        else:
            self._wait.set("room under max_lag_steps", "finetune_0")

    def _log(self, force: bool = False) -> None:
        now = time.monotonic()
        if now < self._next_log and not force:
            return
        self._next_log = now + self._limits.log_every_s
        values = self._metrics.snapshot(now) | {
            "rollouts_under_way": self._workers.num_rollouts,
            "samples_dispatched": self._progress.dispatched,
            "samples_published": self._progress.published,
            "samples_dropped": self._progress.dropped,
            "epoch": max((source.epoch for source in self._progress.sources.values()), default=0),
            "version": self._version if self._version is not None else -1,
            "domain_errors": self._domain_errors,
        }
        if len(self._domains) > 1:
            dropped = self._drops.by_domain()
            kept = {d.name: self._progress.by_domain[d.name] - dropped.get(d.name, 0) for d in self._domains}
            values |= {f"mix/{name}": samples / max(1, sum(kept.values())) for name, samples in kept.items()}
            values["groups_held"] = sum(map(len, self._held))
        removed = sum(len(source.removed) for source in self._progress.sources.values())
        if removed:
            values["problems_removed"] = removed
        self._log_metrics(values, self._version or 0)
        keys = ("rollouts", "rollouts_per_s", "tokens_generated_per_s", "reward", "success", "rollouts_under_way")
        log.info("progress %s", " ".join(f"{key}={_short(values[key])}" for key in keys if key in values))


def poll_timeout_s(quiet_s: float) -> float:
    """How long to wait for workers before looking at the trainer's news: a tenth of how long it has been quiet."""
    return min(MAX_POLL_S, max(MIN_POLL_S, quiet_s / 10))


def _dataset_of(problem: Mapping[str, Any]) -> str:
    return str(problem.get("dataset", "train"))


def _short(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) else f"{value:.3f}"


class _NamedWait:
    """The one wait that the status shows, changed only when it changes."""

    def __init__(self, status: Status):
        self._status = status
        self._name: tuple[str, str] | None = None
        self._stack = contextlib.ExitStack()

    def set(self, what: str, on: str) -> None:
        if self._name != (what, on):
            self.clear()
            self._name = (what, on)
            self._stack.enter_context(self._status.waiting(what, on=on))

    def clear(self) -> None:
        self._stack.close()
        self._name = None
