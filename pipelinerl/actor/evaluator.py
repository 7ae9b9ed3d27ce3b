"""Decides when an evaluation is due, announces it, runs it on one weight version and publishes its result."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelinerl.actor.evaluation import Evaluation, TestItem, TestProblem
from pipelinerl.actor.groups import problem_text
from pipelinerl.actor.messages import Failure, StartGroup
from pipelinerl.actor.publish_gate import newest_used
from pipelinerl.actor.work import Work, WorkEnded, WorkTable
from pipelinerl.observability import spans
from pipelinerl.records import EvaluationDone, EvaluationStarted, RolloutGroup
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


@dataclass(eq=False, kw_only=True)
class TestWork(Work):
    """Attempts at a test problem, as work for a worker."""

    __test__ = False

    item: TestItem


@dataclass(frozen=True, kw_only=True)
class EvaluationTopics:
    """Topics on which evaluations are announced, and on which their rollouts are kept for inspection."""

    announce: Callable[[EvaluationMessage], int]
    publish: Callable[[RolloutGroup], int]


class Evaluator:
    """The evaluations of this actor, one at a time. One thread.

    Args:
        problems: the test problems. Without any there are no evaluations.
        domains: names of the run's domains.
        actor: replica index of this actor.
        last: the newest message on topic ``evaluation``. An evaluation that began and did not end is repeated.
    """

    def __init__(
        self,
        *,
        problems: Sequence[TestProblem],
        rules: EvaluationRules,
        domains: Sequence[str],
        actor: int,
        topics: EvaluationTopics,
        table: WorkTable,
        last: EvaluationMessage | None = None,
    ):
        self._problems, self._rules, self._domains, self._actor = problems, rules, domains, actor
        self._topics, self._table, self._last = topics, table, last
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
        self._topics.announce(self._current.started())
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
        self._topics.announce(current.started())

    def fill(self) -> None:
        """Starts as many attempts as there is room for."""
        while self._current is not None and self._table.has_room(self._rules.attempts):
            item = self._current.next_item()
            if item is None:
                return
            version, problem = self._current.version, item.problem
            start = StartGroup(
                group_id=f"test-{version}-{problem.dataset}-{problem.index}",
                domain=problem.domain,
                problem=problem.problem,
                attempts=item.attempts,
                evaluation=True,
                version=version,
            )
            self._table.submit(TestWork(start=start, item=item, suspect=item.suspect))

    def handle_ended(self, ended: WorkEnded) -> None:
        """Adds the outcome of an item to the running evaluation and publishes its rollouts."""
        work, current = ended.work, self._current
        assert isinstance(work, TestWork)
        if current is None:
            return
        repeat = all(failure.reason.repeats for failure in ended.failures)
        current.add_results(work.item, ended.rollouts, worth_repeating=repeat, suspect=work.suspect)
        if ended.rollouts:
            self._topics.publish(self._group(work, ended, current.version))

    def refuse(self) -> list[Failure]:
        """Takes back the results of servers that missed the weight probe for them, and has their attempts made again.

        The table knows the misses already. Returns the results as failures.
        """
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
        self._topics.announce(done)
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

    def _group(self, work: TestWork, ended: WorkEnded, version: int) -> RolloutGroup:
        problem = work.item.problem
        return RolloutGroup(
            group_id=work.start.group_id,
            epoch=0,
            position=problem.index,
            problem_index=problem.index,
            actor=self._actor,
            domain=self._domains[problem.domain],
            dataset=problem.dataset,
            attempts=self._rules.attempts,
            rollouts=ended.rollouts,
            dispatched_version=version,
            settled_before=0,
            dispatch_index=-1,
            problem=problem_text(problem.problem),
        )
