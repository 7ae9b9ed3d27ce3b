"""Checks exactly that the live tensors are the sent bytes, also for updates too small for log-probabilities to show.

Values that a loader computes instead of copying are not compared (docs/weights.md, weight probe).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch

from pipelinerl.weights.protocol import WeightCheck
from pipelinerl.weights.transfer.shard import StagedCopy

log = logging.getLogger(__name__)


def differing(copies: Iterable[StagedCopy], live: Mapping[str, torch.Tensor], staged: torch.Tensor) -> Iterator[str]:
    """Yields names of live parameters that differ in any bit from the staged bytes, cast to the live dtype.

    Args:
        copies: those of live parameters that keep what was loaded into them.
        staged: flat uint8.
    """
    for copy in copies:
        target = copy.target_view.read(live[copy.target])
        source = copy.source(staged).to(target)
        if not torch.equal(target.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8)):
            yield copy.target


COMPARED = 32
"""Versions whose comparison is remembered."""


@dataclass(eq=False)
class LiveComparison:
    """One comparison of the live model with the bytes of a version."""

    result: WeightCheck | None = None
    """None while it runs."""


class LiveCheck:
    """Compares versions in a thread, one at a time: from the first question on, each version as soon as it is live."""

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
        self._is_asked = True  # from now on no version is replaced before it was compared
        if version not in self._comparisons:
            self._begin(version, compare)
        return self._comparisons[version].result

    def _begin(self, version: int, compare: Callable[[], WeightCheck]) -> None:
        comparison = LiveComparison()
        args = (comparison, compare, self._thread)
        thread = threading.Thread(target=_compare, args=args, name="weight-check", daemon=True)
        thread.start()  # which may fail: a comparison without a thread would never end
        self._thread = thread
        self._comparisons.pop(version, None)
        self._comparisons[version] = comparison
        while len(self._comparisons) > COMPARED:
            del self._comparisons[next(iter(self._comparisons))]


def _compare(comparison: LiveComparison, compare: Callable[[], WeightCheck], previous: threading.Thread | None) -> None:
    if previous is not None:
        previous.join()
    started = time.monotonic()
    try:
        result = compare()
    except Exception as error:  # the thread's boundary: nothing was verified
        log.exception("event=weight_check_failed")
        result = WeightCheck(is_checked=True, differing=(f"the comparison failed: {error}",))
    comparison.result = msgspec.structs.replace(result, check_ms=1e3 * (time.monotonic() - started))
