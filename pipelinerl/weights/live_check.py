"""Compares the versions that become live in a worker with their bytes, in the background."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pipelinerl.weights.protocol import WeightCheck

log = logging.getLogger(__name__)

COMPARED = 32
"""Versions whose comparison is remembered."""


@dataclass(eq=False)
class LiveComparison:
    """One comparison of the live model with the bytes of a version."""

    result: WeightCheck | None = None
    """None while it runs."""


class LiveCheck:
    """Compares versions in a thread, so that the engine's loop is not blocked, one at a time.

    From the first question on, every version is compared as soon as it is live. So no version is replaced before it was
    compared, however late the question about it comes.
    """

    def __init__(self) -> None:
        self._comparisons: dict[int, LiveComparison] = {}
        """The newest `COMPARED`, by version."""
        self._thread: threading.Thread | None = None
        self._is_asked = False

    def is_live(self, version: int, compare: Callable[[], WeightCheck]) -> None:
        """Starts comparing a version that has just become live, if the trainer asks for such comparisons."""
        if self._is_asked:
            self._begin(version, compare)

    def result(self, version: int, compare: Callable[[], WeightCheck]) -> WeightCheck | None:
        """Returns the result for a version, None while the comparison runs. Starts it if that is missing."""
        self._is_asked = True
        if version not in self._comparisons:
            self._begin(version, compare)
        return self._comparisons[version].result

    def _begin(self, version: int, compare: Callable[[], WeightCheck]) -> None:
        self._comparisons.pop(version, None)
        self._comparisons[version] = comparison = LiveComparison()
        while len(self._comparisons) > COMPARED:
            del self._comparisons[next(iter(self._comparisons))]
        args = (comparison, compare, self._thread)
        self._thread = threading.Thread(target=_compare, args=args, name="weight-check", daemon=True)
        self._thread.start()


def _compare(comparison: LiveComparison, compare: Callable[[], WeightCheck], previous: threading.Thread | None) -> None:
    if previous is not None:
        previous.join()
    started = time.monotonic()
    try:
        result = compare()
    except Exception as error:  # the thread's boundary: nothing was proved
        log.exception("event=weight_check_failed")
        result = WeightCheck(is_checked=True, differing=(f"the comparison failed: {error}",))
    comparison.result = msgspec.structs.replace(result, check_ms=1e3 * (time.monotonic() - started))
