"""Which check runs next, and for how long: decisions without clocks and processes.

Nobody knows beforehand what a check costs, so each first gets the shortest of ``SLICES_S``. One that uses up its slice
starts again with the next longer one, and at last in the slow lane with the whole limit. A free worker takes a check
with the shortest slice, and of these the one that has waited longest. So a check that needs at most the first slice
waits at most for the longest one, and for one first slice of each check that came before it.
"""

import collections
import contextlib
from typing import Generic, TypeVar

SLICES_S = (0.003, 0.01, 0.03, 0.1)
"""CPU seconds. 95 % of the answers in the tables of `tests/unit/domains/math_answers` need less than the first.

Each is about three times the one before, so that a check costs at most 2.5 times what it would in one go. Nothing of an
interrupted check is kept: a stopped process would hold its memory."""

T = TypeVar("T")


class Lanes(Generic[T]):
    """The checks that wait for a worker, in one queue per slice and a last one with the whole limit.

    Args:
        workers: number of workers.
        timeout_s: the limit of one check in CPU seconds.
    """

    def __init__(self, *, workers: int, timeout_s: float):
        self.limits_s = (*(slice_s for slice_s in SLICES_S if slice_s < timeout_s), timeout_s)
        """CPU seconds that a check gets in each lane."""
        self._waiting: list[collections.deque[T]] = [collections.deque() for _ in self.limits_s]
        self._num_running = [0] * len(self.limits_s)
        # The slow lane never takes the last of several workers: short checks do not wait for it.
        self._most_running = [workers if limit_s <= SLICES_S[-1] else max(1, workers - 1) for limit_s in self.limits_s]

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def wait(self, lane: int, check: T) -> None:
        """Puts a check at the end of its lane."""
        self._waiting[lane].append(check)

    def leave(self, lane: int, check: T) -> None:
        """Removes a check, if it still waits."""
        with contextlib.suppress(ValueError):
            self._waiting[lane].remove(check)

    def start_next(self) -> tuple[int, T] | None:
        """Returns lane and check that a free worker runs now, and counts it as running. None: it runs nothing."""
        for lane, waiting in enumerate(self._waiting):
            if waiting and self._num_running[lane] < self._most_running[lane]:
                self._num_running[lane] += 1
                return lane, waiting.popleft()
        return None

    def end(self, lane: int) -> None:
        """Counts a check of the lane as no longer running."""
        self._num_running[lane] -= 1
