"""The metrics of a run as columns: every number that its roles logged, read once and added to while the run goes on."""

import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipelinerl.inspect.curves import WINDOW
from pipelinerl.observability.catalogue import STEP, Metric, MetricName
from pipelinerl.observability.metrics import Points

EMPTY = array("d")
FIRST = 64
"""Points of a run's beginning that a bounded series keeps: more than any finding compares with the end."""


class Series:
    """One float64 array per role and metric, oldest point first, with NaN for a point that lacks the metric.

    Args:
        most: points of a role above which those between the first `FIRST` and the newest half are forgotten. None: all
            are kept.
        roles: the points of each role.
    """

    def __init__(self, most: int | None = None, **roles: Points) -> None:
        self._most = most
        self._columns: dict[str, dict[MetricName, array[float]]] = {}
        self._num_points: Counter[str] = Counter()
        for role, points in roles.items():
            self.add(role, points)

    def add(self, role: str, points: Points) -> None:
        columns = self._columns.setdefault(role, defaultdict(lambda: array("d")))
        for point in points:
            for name, value in point.items():
                if isinstance(value, int | float):
                    columns[name].extend([np.nan] * (self._num_points[role] - len(columns[name])))
                    columns[name].append(value)
            self._num_points[role] += 1
            if self._most is not None and self._num_points[role] > self._most:
                self._forget_middle(role, self._most // 2)

    def _forget_middle(self, role: str, newest: int) -> None:
        dropped = slice(FIRST, self._num_points[role] - newest)
        for column in self._columns[role].values():
            del column[dropped]
        self._num_points[role] = FIRST + newest

    def clear(self, role: str) -> None:
        """Forget a role's points: a resumed trainer has cut its file."""
        self._columns.pop(role, None)
        self._num_points[role] = 0

    def num_points(self, role: str) -> int:
        return self._num_points[role]

    def of(self, metric: Metric, *others: MetricName, fewest: int = 1) -> tuple[list[Any], ...]:
        """(steps, values of each metric) of the points that have all these metrics, empty for fewer than ``fewest``."""
        known = self._columns.get(metric.role, {})
        steps, *values = self._shared_points(metric.role, [known.get(name, EMPTY) for name in (metric, *others)])
        return (steps, *values) if len(steps) >= fewest else ([], *([] for _ in values))

    def parts(self, metric: Metric) -> dict[str, tuple[list[Any], ...]]:
        """(steps, values) of a metric with a brace in its name, by the text in its place."""
        columns = metric.found(self._columns.get(metric.role, {}))
        return {part: self._shared_points(metric.role, [column]) for part, column in columns.items()}

    def _shared_points(self, role: str, columns: Sequence["array[float]"]) -> tuple[list[Any], ...]:
        count, steps = self._num_points[role], self._columns.get(role, {}).get(STEP, EMPTY)
        whole = [np.pad(one, (0, count - len(one)), constant_values=np.nan) for one in (steps, *columns)]
        table = np.array(whole)
        found, *values = table[:, np.isfinite(table).all(axis=0)].tolist()
        return ([int(step) for step in found], *values)


class Crossing(NamedTuple):
    """A curve that is above a bound."""

    now: float
    """Its typical newest value."""
    since: int
    """The first step with a value above the bound."""


def beyond(
    steps: Sequence[int],
    values: Sequence[float],
    bound: float,
    typical: Callable[[Sequence[float]], float] = statistics.fmean,
) -> Crossing | None:
    """Whether the newest `WINDOW` values are typically above a bound. None: they are not, or there are none."""
    if not values or (now := typical(values[-WINDOW:])) <= bound:
        return None
    return Crossing(now, next(step for step, value in zip(steps, values, strict=True) if value > bound))
