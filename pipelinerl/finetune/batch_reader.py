"""Reads one rank's optimizer batches from topic `training_data`: complete, in order, each exactly once."""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from pipelinerl.errors import CorruptStreamError
from pipelinerl.records import MicroBatch

log = logging.getLogger(__name__)


class TopicEnd(Protocol):
    """The methods of a topic reader that ``BatchReader`` uses."""

    @property
    def position(self) -> int:
        """Offset of the next record to poll, which may lie steps ahead of what was trained."""
        ...

    def poll(self, timeout_s: float) -> Sequence[tuple[int, MicroBatch]]: ...
    def commit(self, offset: int) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class BatchReader:
    """Collects the micro-batches of each step. Of n preprocessors, number r packs the steps with step % n == r."""

    def __init__(self, readers: Sequence[tuple[str, TopicEnd]]):
        """``readers``: for each preprocessor its key in checkpoints and a reader.

        Each reader stands at or before the first step to train.
        """
        self._readers = readers
        self._resume_offsets = {key: reader.position for key, reader in readers}
        self._taken: tuple[int, dict[int, tuple[int, MicroBatch]]] = (-1, {})
        self._waiting: dict[int, dict[int, tuple[int, MicroBatch]]] = defaultdict(dict)

    def next_step(self, step: int, timeout_s: float, last: int | None = None) -> list[MicroBatch] | None:
        """All micro-batches of ``step`` in order, or None if they do not arrive within ``timeout_s``.

        Args:
            last: also wait for all steps up to this one. They are kept for later calls.
        """
        if not self.has_steps(step, timeout_s, last):
            return None
        self._taken = (step, self._waiting.pop(step))
        found = self._taken[1]
        key, _ = self._readers[step % len(self._readers)]
        self._resume_offsets[key] = 1 + max(offset for offset, _ in found.values())
        return [found[index][1] for index in sorted(found)]

    def has_steps(self, step: int, timeout_s: float, last: int | None = None) -> bool:
        """Whether all of ``step`` … ``last`` arrive within ``timeout_s``. They are kept for ``next_step``."""
        deadline = time.monotonic() + timeout_s
        steps = range(step, (step if last is None else last) + 1)
        return all(self._await(wanted, step, deadline) for wanted in steps)

    def peek(self, step: int) -> list[MicroBatch]:
        """All micro-batches of a later step that `next_step` has waited for, without taking them."""
        assert self._complete(step), f"step {step} is not complete"
        found = self._waiting[step]
        return [found[index][1] for index in sorted(found)]

    def put_back(self) -> None:
        """Undo the last ``next_step``, so that the same step can be read again."""
        step, found = self._taken
        self._waiting[step] = found

    def instance_of(self, step: int) -> int:
        """Number of the preprocessor that packs ``step``."""
        return step % len(self._readers)

    def resume_offsets(self) -> dict[str, int]:
        """Next offset of each reader after the steps read so far, from which a resumed trainer reads."""
        return dict(self._resume_offsets)

    def commit(self, offsets: dict[str, int]) -> None:
        """Release the records below ``offsets``, which no checkpoint needs any more."""
        for key, reader in self._readers:
            if key in offsets:
                reader.commit(offsets[key])

    def sync(self) -> None:
        """Wait until the records that were read are on disk. Safe to call from any thread."""
        for _, reader in self._readers:
            reader.sync()

    def close(self) -> None:
        for _, reader in self._readers:
            reader.close()

    def _await(self, wanted: int, step: int, deadline: float) -> bool:
        """Read until step ``wanted`` is complete. False at the deadline. Records before ``step`` are ignored."""
        key, reader = self._readers[wanted % len(self._readers)]
        while not self._complete(wanted):
            left = deadline - time.monotonic()
            records = reader.poll(max(left, 0.0))
            for offset, record in records:
                self._keep(key, offset, record, step)
            if not records and left <= 0:
                return False
        return True

    def _keep(self, key: str, offset: int, record: MicroBatch, step: int) -> None:
        if record.step < step or record.index in self._waiting[record.step]:
            log.info(
                "event=micro_batch_passed_over stream=%s offset=%d step=%d index=%d",
                key,
                offset,
                record.step,
                record.index,
            )
            return
        self._waiting[record.step][record.index] = (offset, record)

    def _complete(self, step: int) -> bool:
        """Whether all micro-batches of ``step`` have arrived.

        Raises:
            CorruptStreamError: a later step of the same preprocessor arrived first.
        """
        found = self._waiting.get(step)
        if found:
            return len(found) == next(iter(found.values()))[1].count
        turns = len(self._readers)
        later = [s for s, records in self._waiting.items() if records and s > step and s % turns == step % turns]
        if later:
            raise CorruptStreamError(
                f"training_data has step {min(later)} where step {step} must come: the steps between were lost, "
                f"or the checkpoint stands behind step {step}"
            )
        return False
