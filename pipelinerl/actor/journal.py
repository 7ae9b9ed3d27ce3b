"""The actor's own topic: it writes its groups there, and a snapshot of them beside it.

The recorded answers of a group (``answer_journal``) are removed when its record is written.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.actor.answer_journal import AnswerJournal
from pipelinerl.actor.resume import ActorProgress, load_snapshot, save_snapshot
from pipelinerl.records import ActorRecord, OrderResumed
from pipelinerl.streams import TopicReader, TopicWriter, open_reader

log = logging.getLogger(__name__)

SAVE_EVERY_S = 5.0


class TopicJournal:
    """Publishes on topic ``actor`` and keeps a snapshot of the progress that the records add up to.

    Args:
        folder: the job's folder, for the snapshot.
        groups: writer of topic ``actor``.
        cursor: reader that protects records from deletion until a snapshot covers them. None: nothing is deleted.
        progress: counts the records.
    """

    def __init__(self, folder: Path, groups: TopicWriter, cursor: TopicReader | None, progress: ActorProgress):
        self._folder, self._groups, self._progress = folder, groups, progress
        self._cursor = cursor
        self._answers = AnswerJournal(folder)
        self._next_save = time.monotonic() + SAVE_EVERY_S

    def replay(self) -> None:
        """Restores the progress of an earlier process of this job from the snapshot and the records after it."""
        snapshot = load_snapshot(self._folder)
        if snapshot is not None:
            self._progress.restore(snapshot)
        offset = snapshot.offset if snapshot else 0
        with open_reader(self._groups.spec, ActorRecord, name=None, start=offset) as reader:
            for _, record in reader.read_all():
                self._apply(record)
        self._progress.forget_in_flight()
        if self._groups.next_offset:
            log.info(
                "event=journal_continued records=%d published=%d", self._groups.next_offset, self._progress.published
            )

    def begin(self, record: OrderResumed) -> None:
        """Writes the first record of an empty topic, after a restart from a checkpoint.

        Recorded answers are forgotten before: weights that sampled them may be lost.
        """
        self._answers.clear()
        self._groups.write(record)
        self._progress.apply(record)
        self._progress.forget_in_flight()
        self.save()

    def publish(self, record: ActorRecord) -> None:
        """Appends the record and counts it. Saves first if the last save is ``SAVE_EVERY_S`` ago."""
        if time.monotonic() >= self._next_save:
            self.save()
        self._groups.write(record)
        self._apply(record)

    def forget_answers(self, group_id: str, attempts: Sequence[int]) -> None:
        """Has attempts that failed sampled anew."""
        self._answers.remove(group_id, attempts)

    def save(self) -> None:
        """Syncs the records, writes a snapshot that covers them, then permits their deletion."""
        offset = self._groups.next_offset
        self._answers.flush()  # nobody repeats it for a record that the snapshot covers
        self._groups.sync()
        save_snapshot(self._folder, self._progress.snapshot(offset))
        if self._cursor is not None:
            self._cursor.commit(offset)
        self._next_save = time.monotonic() + SAVE_EVERY_S

    def _apply(self, record: ActorRecord) -> None:
        self._progress.apply(record)
        if not isinstance(record, OrderResumed):
            self._answers.resolve(record.group_id, range(record.attempts))
