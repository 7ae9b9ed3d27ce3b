"""One evaluation: all attempts at every test problem on one weight version. Pure: the evaluator does the I/O.

A rollout counts only if each of its tokens was sampled by the announced version. When servers move to another version,
the evaluation is announced again for that version and starts over. An attempt that fails for infrastructure reasons is
repeated. If it keeps failing it is left out and never scored. At the deadline the evaluation ends with the results so
far and reports how complete it is.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.records import EvaluationDone, EvaluationStarted, Rollout


@dataclass(frozen=True, kw_only=True)
class TestProblem:
    """A test problem with its domain, data set and index."""

    __test__ = False

    domain: int
    dataset: str
    index: int
    problem: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TestItem:
    """Attempts to make at a test problem."""

    __test__ = False

    problem: TestProblem
    attempts: tuple[int, ...]
    tries: int
    suspect: bool = False
    """Whether its worker died because of it."""


@dataclass(eq=False)
class Evaluation:
    """A running evaluation.

    Example: announce ``started()``, give each ``next_item()`` to a worker and its result to ``take``. Publish
    ``done()`` once ``finished`` is true.
    """

    problems: Sequence[TestProblem]
    attempts: int
    version: int
    deadline: float
    """Unix time."""
    max_repeats: int
    queue: deque[TestItem] = field(default_factory=deque)
    under_way: int = 0
    rollouts: dict[tuple[int, str, int], list[Rollout]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fill()

    def started(self) -> EvaluationStarted:
        return EvaluationStarted(version=self.version, deadline=self.deadline)

    def restart(self, version: int) -> None:
        """Starts over on another version. The caller must cancel the running items."""
        self.version = version
        self.rollouts.clear()
        self.queue.clear()
        self.under_way = 0
        self._fill()

    def next_item(self) -> TestItem | None:
        if not self.queue:
            return None
        self.under_way += 1
        return self.queue.popleft()

    def add_results(
        self, item: TestItem, rollouts: Iterable[Rollout], *, worth_repeating: bool, suspect: bool = False
    ) -> None:
        """Records the rollouts of an item that has ended.

        Attempts that are missing, or were sampled by another version, are queued again up to ``max_repeats`` times.
        ``suspect`` as in ``TestItem``.
        """
        self.under_way -= 1
        good = [rollout for rollout in rollouts if versions_of(rollout) <= {self.version}]
        self.rollouts.setdefault(_key(item.problem), []).extend(good)
        missing = tuple(sorted(set(item.attempts) - {rollout.attempt for rollout in good}))
        if missing and worth_repeating and item.tries < self.max_repeats:
            again = TestItem(problem=item.problem, attempts=missing, tries=item.tries + 1, suspect=suspect)
            self.queue.append(again)

    def repeat(self, problem: TestProblem, attempts: Iterable[int]) -> None:
        """Takes the rollouts of these attempts out, and queues the attempts again."""
        again = tuple(sorted(attempts))
        kept = [rollout for rollout in self.rollouts[_key(problem)] if rollout.attempt not in again]
        self.rollouts[_key(problem)] = kept
        self.queue.append(TestItem(problem=problem, attempts=again, tries=0))

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
        self.queue.extend(TestItem(problem=problem, attempts=attempts, tries=0) for problem in self.problems)


def versions_of(rollout: Rollout) -> set[int]:
    """Returns the weight versions that sampled the rollout."""
    return {int(version) for sequence in rollout.sequences for version in sequence.spans[:, 2]}


def _key(problem: TestProblem) -> tuple[int, str, int]:
    return problem.domain, problem.dataset, problem.index


def _mean(rollouts: list[Rollout], name: str) -> float:
    values = [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics]
    return sum(values) / len(values) if values else 0.0
