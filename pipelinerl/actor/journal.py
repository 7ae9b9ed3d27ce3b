"""The actor's access to its topics: it writes its groups and a snapshot of them, and reads the preprocessor's drops."""

import logging
import threading
import time
from pathlib import Path

from pipelinerl.actor.progress import ActorProgress, load_snapshot, save_snapshot
from pipelinerl.errors import StreamError
from pipelinerl.records import ActorRecord, OrderResumed, PreprocessorProgress, topics
from pipelinerl.streams import SingleStreamSpec, TopicReader, TopicWriter, open_reader

log = logging.getLogger(__name__)

LISTEN_S = 0.5
SAVE_EVERY_S = 5.0


class TopicJournal:
    """Publishes on topic ``actor`` and keeps a snapshot of the progress that the records add up to.

    Args:
        folder: the job's folder, for the snapshot.
        groups: writer of topic ``actor``.
        keeper: reader that protects records from deletion until a snapshot covers them. None: nothing is deleted.
        progress: counts the records.
    """

    def __init__(self, folder: Path, groups: TopicWriter, keeper: TopicReader | None, progress: ActorProgress):
        self._folder, self._groups, self._progress = folder, groups, progress
        self._keeper = keeper
        self._next_save = time.monotonic() + SAVE_EVERY_S

    def replay(self) -> None:
        """Restores the progress of an earlier process of this job from the snapshot and the records after it."""
        snapshot = load_snapshot(self._folder)
        if snapshot is not None:
            self._progress.restore(snapshot)
        offset = snapshot.offset if snapshot else 0
        with open_reader(self._groups.spec, ActorRecord, name=None, start=offset) as reader:
            for _, record in reader.read_all():
                self._progress.apply(record)
        self._progress.resume()
        if self._groups.next_offset:
            log.info(
                "event=journal_continued records=%d published=%d", self._groups.next_offset, self._progress.published
            )

    def begin(self, record: OrderResumed) -> None:
        """Writes the first record of an empty topic, after a restart from a checkpoint."""
        self._groups.write(record)
        self._progress.apply(record)
        self._progress.resume()
        self.save()

    def publish(self, record: ActorRecord) -> None:
        """Appends the record and counts it. Saves first if the last save is ``SAVE_EVERY_S`` ago."""
        if time.monotonic() >= self._next_save:
            self.save()
        self._groups.write(record)
        self._progress.apply(record)

    def save(self) -> None:
        """Syncs the records, writes a snapshot that covers them, then permits their deletion."""
        offset = self._groups.next_offset
        self._groups.sync()
        save_snapshot(self._folder, self._progress.snapshot(offset))
        if self._keeper is not None:
            self._keeper.commit(offset)
        self._next_save = time.monotonic() + SAVE_EVERY_S


class DropListener:
    """Counts the samples that the preprocessor dropped. A separate thread reads them from topic ``preprocessor``."""

    def __init__(self, run_dir: Path, replica: int):
        self._spec = SingleStreamSpec(run_dir, topics.PREPROCESSOR, instance=replica)
        self._total = 0
        self._by_domain: dict[str, int] = {}
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="preprocessor-drops", daemon=True)
        self._thread.start()

    def total(self) -> int:
        if self._failure is not None:
            raise StreamError(f"the listener on {self._spec} died: {self._failure}") from self._failure
        return self._total

    def by_domain(self) -> dict[str, int]:
        return self._by_domain

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        """Reads progress records until ``stop`` or a failure, which the next ``total`` raises."""
        try:
            with open_reader(self._spec, PreprocessorProgress, name=None, over_damage=True) as reader:
                while not self._stop.is_set():
                    for _, progress in reader.poll(LISTEN_S):
                        self._total = progress.samples_dropped
                        self._by_domain = progress.dropped_by_domain
        except Exception as error:  # the thread's boundary
            self._failure = error
