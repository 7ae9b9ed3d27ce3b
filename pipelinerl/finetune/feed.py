"""The trainer's end of topic `training_data`: whole optimizer batches of one rank, in order, each exactly once."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from pipelinerl.errors import StreamError
from pipelinerl.records import MicroBatch

log = logging.getLogger(__name__)


class Reader(Protocol):
    """The part of a topic reader that is used here."""

    position: int

    def poll(self, timeout_s: float) -> Sequence[tuple[int, MicroBatch]]: ...
    def commit(self, offset: int) -> None: ...
    def close(self) -> None: ...


class Feed:
    """Collects the micro-batches of a step from the readers of one partition (one reader per preprocessor)."""

    def __init__(self, readers: dict[str, Reader], first_step: int):
        """``readers`` by `<instance>/<partition>`, placed at or before the first record of ``first_step``."""
        self._readers = readers
        self._first_step = first_step
        self._waiting: dict[int, dict[int, tuple[str, int, MicroBatch]]] = defaultdict(dict)
        self._next = {key: reader.position for key, reader in readers.items()}

    def next_step(self, step: int, stop: Callable[[], bool], poll_s: float = 0.2) -> list[MicroBatch] | None:
        """All micro-batches of ``step`` in order; None when ``stop()`` turned true first."""
        while not self._complete(step):
            if stop():
                return None
            for key, reader in self._readers.items():
                for offset, record in reader.poll(poll_s / len(self._readers)):
                    self._keep(key, offset, record, step)
        found = self._waiting.pop(step)
        for key, offset, _ in found.values():
            self._next[key] = max(self._next[key], offset + 1)
        return [found[index][2] for index in sorted(found)]

    def positions(self) -> dict[str, int]:
        """Next offset of each reader after the steps that were taken: where a resumed trainer goes on."""
        return dict(self._next)

    def commit(self, positions: dict[str, int]) -> None:
        """Records below ``positions`` are needed by no checkpoint any more."""
        for key, position in positions.items():
            if key in self._readers:
                self._readers[key].commit(position)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _keep(self, key: str, offset: int, record: MicroBatch, step: int) -> None:
        if record.step < step:
            if record.step >= self._first_step:
                log.warning(
                    "duplicate micro-batch skipped step=%d index=%d offset=%d", record.step, record.index, offset
                )
            return
        known = self._waiting[record.step].get(record.index)
        if known is not None:
            log.warning("duplicate micro-batch skipped step=%d index=%d offset=%d", record.step, record.index, offset)
            return
        self._waiting[record.step][record.index] = (key, offset, record)

    def _complete(self, step: int) -> bool:
        found = self._waiting.get(step)
        if not found:
            later = [s for s, records in self._waiting.items() if records and len(records) == self._count(records)]
            if later and min(later) > step and len(self._readers) == 1:
                raise StreamError(f"training_data holds step {min(later)} but not step {step}, which comes before it")
            return False
        return len(found) == self._count(found)

    @staticmethod
    def _count(records: dict[int, tuple[str, int, MicroBatch]]) -> int:
        return next(iter(records.values()))[2].count
