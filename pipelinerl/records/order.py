"""Progress of training through the problems, which a checkpoint stores so that it can continue without its streams.

An actor takes the problems of a domain in epochs, each a permutation (``actor.problems``). Its turns in an epoch are
numbered 0, 1, … A turn is resolved when its group has been trained, at least in part, or will never be trained.
Records and files spell that `settled`.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the policy did on a problem in one group."""

    problem_index: int
    success: float | None = None
    """Share of its attempts that succeeded. None: it was dropped."""
    spread: float | None = None
    """Mean of |reward − the group's mean reward|, the size of its advantages before any scaling. None: as above."""
    version: int = -1
    """Weight version that was live when it began. −1: it was dropped."""


class ProblemHistory(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How the policy has done on one problem, for `actor.sampler`.

    Means are over its groups, and each newer one counts as much as all before it: m ← (m + newest) / 2.
    """

    groups: int = 0
    """Groups that ended, published or dropped."""
    success: float | None = None
    """Mean of ``GroupOutcome.success``. None: no group was published."""
    spread: float | None = None
    """Mean of ``GroupOutcome.spread``. None: no group was published."""
    version: int = -1
    """The newest ``GroupOutcome.version``. −1: no group was published."""

    def after(self, outcome: GroupOutcome) -> "ProblemHistory":
        """Returns the history with one more group."""
        return ProblemHistory(
            groups=self.groups + 1,
            success=_mean(self.success, outcome.success),
            spread=_mean(self.spread, outcome.spread),
            version=max(self.version, outcome.version),
        )


class EpochOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved turns of one epoch."""

    size: int
    """Turns of this actor in the epoch. 0 = not known yet, because no turn is resolved."""
    settled: tuple[tuple[int, int], ...]
    """Ranges (first, end exclusive) of turns, ascending."""


class DomainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Epochs of one domain."""

    samples: int = 0
    """Rollouts of the domain in the trained batches of this actor's stream."""
    done: tuple[tuple[int, int], ...] = ()
    """Ranges (first, end exclusive) of completely resolved epochs."""
    epochs: dict[int, EpochOrder] = {}
    """Partly resolved epochs, by number."""
    history: dict[int, ProblemHistory] = {}
    """History of every problem with a resolved turn, by its index. Kept only with `actor.sampler`."""


class DataOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved problems of one actor, by domain."""

    domains: dict[str, DomainOrder] = {}


class OrderFold:
    """Accumulates resolved turns into a ``DataOrder``. A turn may be added twice."""

    def __init__(self, order: DataOrder | None = None):
        self._samples: Counter[str] = Counter()
        self._done: dict[str, set[int]] = {}
        self._epochs: dict[str, dict[int, tuple[int, set[int]]]] = {}
        self._histories: dict[str, dict[int, ProblemHistory]] = {}
        for name, domain in (order or DataOrder()).domains.items():
            self._samples[name] = domain.samples
            self._done[name] = numbers(domain.done)
            self._epochs[name] = {n: (epoch.size, numbers(epoch.settled)) for n, epoch in domain.epochs.items()}
            self._histories[name] = dict(domain.history)

    def mark_resolved(self, domain: str, epoch: int, turn: int, size: int) -> None:
        """Marks ``turn`` of an epoch with ``size`` turns as resolved."""
        done, epochs = self._done.setdefault(domain, set()), self._epochs.setdefault(domain, {})
        if epoch in done:
            return
        turns = epochs.get(epoch, (0, set()))[1]
        turns.add(turn)
        epochs[epoch] = (size, turns)
        if len(turns) == size:
            done.add(epoch)
            del epochs[epoch]

    def observe(self, domain: str, outcome: GroupOutcome) -> None:
        """Adds a group to the history of its problem. A group must not be added twice."""
        history = self._histories.setdefault(domain, {})
        history[outcome.problem_index] = history.get(outcome.problem_index, ProblemHistory()).after(outcome)

    def count(self, domains: Iterable[str]) -> None:
        """Counts the samples of a batch. ``domains`` has one name per sample."""
        self._samples.update(domains)

    def to_record(self) -> DataOrder:
        names = sorted(self._samples.keys() | self._done.keys())
        return DataOrder(domains={name: self._domain(name) for name in names})

    def _domain(self, name: str) -> DomainOrder:
        epochs = self._epochs.get(name, {})
        return DomainOrder(
            samples=self._samples[name],
            done=ranges(self._done.get(name, ())),
            epochs={n: EpochOrder(size=size, settled=ranges(turns)) for n, (size, turns) in sorted(epochs.items())},
            history=dict(self._histories.get(name, {})),
        )


def ranges(values: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Returns ascending ranges (first, end exclusive) of the values.

    >>> ranges([4, 0, 1, 5])
    ((0, 2), (4, 6))
    """
    found: list[list[int]] = []
    for value in sorted(values):
        if found and found[-1][1] == value:
            found[-1][1] += 1
        else:
            found.append([value, value + 1])
    return tuple((first, end) for first, end in found)


def numbers(found: Iterable[tuple[int, int]]) -> set[int]:
    """Returns all values in the ranges."""
    return {value for first, end in found for value in range(first, end)}


def _mean(before: float | None, newest: float | None) -> float | None:
    return before if newest is None else newest if before is None else (before + newest) / 2
