"""Tells whether an evaluation is running, during which the servers' weights must not change."""

import logging
import time
from collections.abc import Callable, Sequence

from pipelinerl.records import EvaluationDone, EvaluationStarted

log = logging.getLogger(__name__)


class EvaluationLease:
    """Follows topic `evaluation` to tell whether the servers' weights may change."""

    def __init__(self, poll: Callable[[], Sequence[object]], clock: Callable[[], float] = time.time):
        """``poll`` returns the messages since its last call. ``clock`` returns seconds since 1970."""
        self._poll, self._clock = poll, clock
        self._open: EvaluationStarted | None = None

    def held(self, version: int) -> bool:
        """Whether an evaluation of another version than ``version`` has neither ended nor expired."""
        for message in self._poll():
            if isinstance(message, EvaluationStarted):
                self._open = message
            elif isinstance(message, EvaluationDone) and self._open and message.version == self._open.version:
                self._open = None
        if self._open and self._clock() >= self._open.deadline:
            log.warning("event=evaluation_lease_expired version=%d", self._open.version)
            self._open = None
        return self._open is not None and self._open.version != version
