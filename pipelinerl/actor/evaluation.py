"""Evaluations of this actor: when one is due, all attempts at every test problem on one weight version, its result.

A rollout counts only if each of its tokens was sampled by the announced version. If servers change it, the evaluation
starts over. An attempt that keeps failing is left out and never scored. At the deadline the results so far count.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.actor.groups import problem_text
from pipelinerl.actor.messages import Failure, GroupFinished, StartGroup
from pipelinerl.actor.publish_gate import newest_used
from pipelinerl.actor.work import Work, WorkTable
from pipelinerl.observability import spans
from pipelinerl.records import EvaluationDone, EvaluationStarted, Rollout, RolloutGroup
from pipelinerl.records.messages import EvaluationMessage

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationRules:
    """The configuration's settings for evaluations."""

    every_n_versions: int
    at_start: bool
    at_end: bool
    attempts: int
    timeout_s: float
    max_repeats: int


@dataclass(frozen=True, kw_only=True)
class TestProblem:
    """A test problem with its domain, data set and index."""

    __test__ = False

    domain: int
    dataset: str
    index: int
    problem: dict[str, Any]


@dataclass(eq=False, kw_only=True)
class TestWork(Work):
    """Attempts at a test problem, as work for a worker."""

    __test__ = False

    problem: TestProblem
    tries: int = 0
    """How often attempts of it were repeated."""


@dataclass(eq=False)
class Evaluation:
    """A running evaluation.

    Example: announce ``started()``, give each ``next_work()`` to a worker and its result to ``add_results``. Publish
    ``done()`` once ``finished`` is true.
    """

    problems: Sequence[TestProblem]
    attempts: int
    version: int
    deadline: float
    """Unix time."""
    max_repeats: int
    queue: deque[TestWork] = field(default_factory=deque)
    under_way: int = 0
    rollouts: dict[tuple[int, str, int], list[Rollout]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fill()

    def started(self) -> EvaluationStarted:
        return EvaluationStarted(version=self.version, deadline=self.deadline)

    def restart(self, version: int) -> None:
        """Starts over on another version. The caller must cancel the running work."""
        self.version = version
        self.rollouts.clear()
        self.queue.clear()
        self.under_way = 0
        self._fill()

    def next_work(self) -> TestWork | None:
        if not self.queue:
            return None
        self.under_way += 1
        return self.queue.popleft()

    def add_results(self, work: TestWork, rollouts: Iterable[Rollout], *, worth_repeating: bool) -> None:
        """Records the rollouts of ended work. Attempts that are missing or of another version are queued again."""
        self.under_way -= 1
        good = [rollout for rollout in rollouts if rollout.versions <= {self.version}]
        self.rollouts.setdefault(_key(work.problem), []).extend(good)
        missing = tuple(sorted(set(work.start.attempts) - {rollout.attempt for rollout in good}))
        if missing and worth_repeating and work.tries < self.max_repeats:
            work.narrow(missing)
            work.tries += 1
            self.queue.append(work)

    def repeat(self, problem: TestProblem, attempts: Iterable[int]) -> None:
        """Takes the rollouts of these attempts out, and queues the attempts again."""
        again = tuple(sorted(attempts))
        kept = [rollout for rollout in self.rollouts[_key(problem)] if rollout.attempt not in again]
        self.rollouts[_key(problem)] = kept
        self.queue.append(self._work(problem, again))

    def of(self, problem: TestProblem) -> list[Rollout]:
        """Returns the results of a problem so far."""
        return self.rollouts.get(_key(problem), [])

    @property
    def finished(self) -> bool:
        return not self.queue and not self.under_way

    @property
    def progress(self) -> str:
        """Attempts with a result and attempts in all, as `120/512`."""
        return f"{sum(map(len, self.rollouts.values()))}/{len(self.problems) * self.attempts}"

    @property
    def expired(self) -> bool:
        return time.time() > self.deadline

    def done(self) -> EvaluationDone:
        """Builds the result from the rollouts so far."""
        by_dataset: dict[str, list[Rollout]] = {}
        outcomes: dict[str, list[tuple[int, int]]] = {}
        for (_, dataset, _), rollouts in sorted(self.rollouts.items()):
            by_dataset.setdefault(dataset, []).extend(rollouts)
            solved = sum(rollout.metrics.get("success", 0.0) > 0 for rollout in rollouts)
            outcomes.setdefault(dataset, []).append((len(rollouts), solved))
        everything = [rollout for rollouts in by_dataset.values() for rollout in rollouts]
        metrics = {"complete": len(everything) / (len(self.problems) * self.attempts)}
        for dataset, rollouts in by_dataset.items():
            names = sorted({name for rollout in rollouts for name in rollout.metrics})
            metrics |= {f"{dataset}/{name}": _mean(rollouts, name) for name in names}
        return EvaluationDone(
            version=self.version,
            success=_mean(everything, "success") if everything else None,
            reward=_mean(everything, "reward") if everything else None,
            num_rollouts=len(everything),
            metrics=metrics,
            outcomes={dataset: tuple(pairs) for dataset, pairs in outcomes.items()},
            timestamp=time.time(),
        )

    def _fill(self) -> None:
        attempts = tuple(range(self.attempts))
        self.queue.extend(self._work(problem, attempts) for problem in self.problems)

    def _work(self, problem: TestProblem, attempts: tuple[int, ...]) -> TestWork:
        start = StartGroup(
            group_id=f"test-{self.version}-{problem.dataset}-{problem.index}",
            domain=problem.domain,
            problem=problem.problem,
            attempts=attempts,
            evaluation=True,
            version=self.version,
        )
        return TestWork(start=start, problem=problem)


class Evaluator:
    """The evaluations of this actor, one at a time. One thread.

    Args:
        problems: the test problems. Without any there are no evaluations.
        announce: writes to topic ``evaluation``.
        publish: keeps rollouts for inspection.
        last: the newest message on topic ``evaluation``. An evaluation that began and did not end is repeated.
    """

    def __init__(
        self,
        *,
        problems: Sequence[TestProblem],
        rules: EvaluationRules,
        domains: Sequence[str],
        actor: int,
        announce: Callable[[EvaluationMessage], int],
        publish: Callable[[RolloutGroup], int],
        table: WorkTable,
        last: EvaluationMessage | None = None,
    ):
        self._problems, self._rules, self._domains, self._actor = problems, rules, domains, actor
        self._announce, self._publish, self._table, self._last = announce, publish, table, last
        self._current: Evaluation | None = None
        self._began = 0
        self._complete: tuple[float, dict[str, int]] | None = None
        """When the running evaluation had all its results, and ``newest_used`` of them."""

    @property
    def is_running(self) -> bool:
        return self._current is not None

    @property
    def progress(self) -> str | None:
        """Progress of the running evaluation, as `120/512`. None if none is running."""
        return self._current.progress if self._current else None

    @property
    def awaits_check(self) -> bool:
        """Whether a complete evaluation waits for a weight probe."""
        return self._complete is not None

    def is_due(self, version: int | None, finishing: bool) -> bool:
        """Whether to start an evaluation of the live ``version``. ``finishing``: training is done."""
        if not self._problems or version is None:
            return False
        last, rules = self._last, self._rules
        if isinstance(last, EvaluationStarted):
            return True
        if finishing:
            return rules.at_end and (last is None or last.version < version)
        if last is None and rules.at_start:
            return True
        every = rules.every_n_versions
        return every > 0 and version >= (last.version if last else 0) + every

    def start(self, version: int) -> None:
        """Announces an evaluation of this version and makes it the current one."""
        self._current = Evaluation(
            problems=self._problems,
            attempts=self._rules.attempts,
            version=version,
            deadline=time.time() + self._rules.timeout_s,
            max_repeats=self._rules.max_repeats,
        )
        self._began = time.time_ns()
        self._announce(self._current.started())
        log.info("event=evaluation_started version=%d problems=%d", version, len(self._problems))

    def move_to(self, version: int) -> None:
        """Restarts the running evaluation when the servers have moved to another version."""
        current = self._current
        if current is None or current.version == version:
            return
        log.info("event=evaluation_restarted version=%d was=%d", version, current.version)
        self._table.cancel(TestWork)
        self._complete = None
        current.restart(version)
        self._announce(current.started())

    def fill(self) -> None:
        """Starts as many attempts as there is room for."""
        while self._current is not None and self._table.has_room(self._rules.attempts):
            work = self._current.next_work()
            if work is None:
                return
            self._table.submit(work)

    def handle_ended(self, work: TestWork, ended: GroupFinished) -> None:
        """Adds the outcome of work to the running evaluation and publishes its rollouts."""
        current = self._current
        if current is None:
            return
        repeat = all(failure.reason.repeats for failure in ended.failures)
        current.add_results(work, ended.rollouts, worth_repeating=repeat)
        if ended.rollouts:
            self._publish(self._group(work, ended.rollouts, current.version))

    def refuse(self) -> list[Failure]:
        """Takes back results whose servers missed the weight probe, and returns them as failures to be repeated."""
        current, failed = self._current, list[Failure]()
        self._complete = None
        if current is None:
            return failed
        for problem in current.problems:
            _, refused = self._table.misses.sort(current.of(problem))
            if refused:
                current.repeat(problem, (failure.attempt for failure in refused))
                failed += refused
        return failed

    def finish(self) -> EvaluationDone | None:
        """Publishes and returns the result of an evaluation that is complete or past its deadline, else None."""
        current = self._current
        if current is None or not (current.expired or (current.finished and self._is_verified(current))):
            return None
        self._table.cancel(TestWork)
        done = current.done()
        self._announce(done)
        self._last, self._current, self._complete = done, None, None
        spans.record("evaluation", f"evaluation {done.version}", self._began, root=True, version=done.version)
        log.info(
            "event=evaluation_done version=%d success=%s reward=%s rollouts=%s",
            *(done.version, done.success, done.reward, current.progress),
        )
        return done

    def _is_verified(self, current: Evaluation) -> bool:
        """Whether no result of the complete evaluation waits for the weight probe of its server."""
        now = time.monotonic()
        if self._complete is None:
            used = newest_used(rollout for rollouts in current.rollouts.values() for rollout in rollouts)
            self._complete = now, used
        finished, used = self._complete
        return not self._table.gate.holds(used, finished=finished, now=now)

    def _group(self, work: TestWork, rollouts: tuple[Rollout, ...], version: int) -> RolloutGroup:
        problem = work.problem
        return RolloutGroup(
            group_id=work.start.group_id,
            epoch=0,
            position=problem.index,
            problem_index=problem.index,
            actor=self._actor,
            domain=self._domains[problem.domain],
            dataset=problem.dataset,
            attempts=self._rules.attempts,
            rollouts=rollouts,
            dispatched_version=version,
            settled_before=0,
            dispatch_index=-1,
            problem=problem_text(problem.problem),
        )


def _key(problem: TestProblem) -> tuple[int, str, int]:
    return problem.domain, problem.dataset, problem.index


def _mean(rollouts: list[Rollout], name: str) -> float:
    values = [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics]
    return sum(values) / len(values) if values else 0.0
