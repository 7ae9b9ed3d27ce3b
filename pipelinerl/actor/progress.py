"""What this actor dispatched and finished: a fold over its own records, which it writes to its topic and saves beside.

A snapshot holds the fold up to an offset of topic ``actor``. A restart applies the later records, and dispatches first
what was dispatched and has no record.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pipelinerl.actor.answer_journal import AnswerJournal
from pipelinerl.actor.problems import EpochProgress, Place, ProblemSource
from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.records import ActorRecord, BatchUnit, OrderResumed, ProblemHistory, RolloutGroup, outcome_of
from pipelinerl.records.order import DomainOrder
from pipelinerl.streams import TopicReader, TopicWriter, open_reader
from pipelinerl.streams.frames import framed, only_payload
from pipelinerl.world.disk import make_folder, replace_file

log = logging.getLogger(__name__)

SAVE_EVERY_S = 5.0
"""After a crash the records of this time are read again. Each save waits for the disk."""
SNAPSHOT_FILE = "progress.msgpack"
"""One frame, as a record has it: a byte that changed would have groups published twice."""


class DomainSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One domain's place in its problems."""

    next_epoch: int
    epochs: tuple[EpochProgress, ...]
    removed: tuple[int, ...]
    pass_counts: dict[int, tuple[int, int]]
    """Problem index → (successes, attempts). Kept only with no-positive-resampling."""
    history: dict[int, ProblemHistory] = {}
    """By problem index. Kept only with a sampler."""


class ActorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The fold over all records of this actor before ``offset``."""

    offset: int
    published: int
    units: int | None = None
    """None, in a snapshot of before: ``published``."""
    dropped: int
    by_domain: dict[str, int]
    resolved_by_domain: dict[str, int] = msgspec.field(name="settled_by_domain")
    before: int
    later: tuple[int, ...]
    domains: dict[str, DomainSnapshot]


class ActorProgress:
    """Counts samples, assigns dispatch numbers, and tracks every domain's place in its problems.

    Args:
        sources: the problems of each domain, by name.
        no_positive_resampling: success rate from which a problem leaves the pool. None: problems never leave.
        unit: what an optimizer batch counts (`finetune.batch_unit`).

    Example:
        >>> progress = ActorProgress({"guessing": ProblemSource(num_problems=2, seed=0, name="guessing")})
        >>> progress.dispatch(8), progress.dispatch(8), progress.dispatched
        (0, 1, 16)
    """

    def __init__(
        self,
        sources: Mapping[str, ProblemSource],
        no_positive_resampling: float | None = None,
        unit: BatchUnit = "rollouts",
    ):
        self.sources = dict(sources)
        self._unit = unit
        self.dispatched = 0
        """Samples dispatched."""
        self.published = 0
        """Samples published."""
        self.units = 0
        """What they fill of optimizer batches: as many, or their texts."""
        self.dropped = 0
        """Samples dispatched that will never be published."""
        self.by_domain: Counter[str] = Counter()
        """Samples published per domain."""
        self.resolved_by_domain: Counter[str] = Counter()
        """Samples published or dropped per domain."""
        self.before = 0
        """Every dispatch with a lower number is published or dropped."""
        self._later: set[int] = set()
        self._next = 0
        self._threshold = no_positive_resampling
        self._pass_counts: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in self.sources}
        self._saved_epochs: dict[str, int] | None = None

    def dispatch(self, samples: int) -> int:
        """Counts a dispatch and returns its number, the lowest that is neither resolved nor assigned."""
        self.dispatched += samples
        index = self._next
        self._next += 1
        while self._next in self._later:
            self._next += 1
        return index

    def apply(self, record: ActorRecord) -> None:
        """Counts a record: a dispatch was published (fully or partly) or dropped, or a checkpoint begins the stream."""
        if isinstance(record, OrderResumed):
            self._begin(record)
            return
        rollouts = record.rollouts if isinstance(record, RolloutGroup) else ()
        self.published += len(rollouts)
        self.units += sum(rollout.size(self._unit) for rollout in rollouts)
        self.dropped += record.attempts - len(rollouts)
        self.by_domain[record.domain] += len(rollouts)
        self.resolved_by_domain[record.domain] += record.attempts
        self._later.add(record.dispatch_index)
        while self.before in self._later:
            self._later.remove(self.before)
            self.before += 1
        source = self.sources.get(record.domain)
        if source is not None:
            place = Place(epoch=record.epoch, position=record.position, problem_index=record.problem_index)
            source.mark_resolved(place)
            if source.sampler is not None:
                source.sampler.observe(outcome_of(record))
            successes = sum(rollout.metrics.get("success", 0.0) > 0 for rollout in rollouts)
            self._count_passes(source, record.domain, record.problem_index, successes, len(rollouts))

    def _begin(self, record: OrderResumed) -> None:
        self.units, self.dropped = record.published, 0
        for name, source in self.sources.items():
            order = record.order.domains.get(name, DomainOrder())
            self.by_domain[name] = self.resolved_by_domain[name] = order.samples
            if source.sampler is not None:
                source.sampler.restore(order.history)
            source.resume_from_checkpoint(order, record.removed.get(name, ()), record.removed_at.get(name, {}))
        self.published = record.published if self._unit == "rollouts" else self.by_domain.total()

    @property
    def expected_units(self) -> float:
        """Units of all samples dispatched and not dropped. One under way counts as the mean of the published ones."""
        return self.units + (self.dispatched - self.dropped - self.published) * self.units_per_rollout

    @property
    def is_rollout_size_known(self) -> bool:
        """Whether the size of a rollout under way is known: one unit, or the mean of the published ones."""
        return self._unit == "rollouts" or self.published > 0

    @property
    def units_per_rollout(self) -> float:
        """Mean over the published rollouts. 1 until there is one."""
        return self.units / self.published if self.published else 1.0

    def _count_passes(self, source: ProblemSource, domain: str, index: int, passed: int, tried: int) -> None:
        """No-positive-resampling (docs/algorithms.md §5): a problem that is nearly always solved leaves the pool."""
        if self._threshold is None or not tried:
            return
        counts = self._pass_counts[domain]
        before = counts.get(index, (0, 0))
        counts[index] = (before[0] + passed, before[1] + tried)
        if counts[index][0] >= self._threshold * counts[index][1]:
            source.remove(index)

    @property
    def epoch_began(self) -> bool:
        """Whether a domain began an epoch since the last snapshot. Its order must be saved before it is used."""
        return self._saved_epochs != {name: source.next_epoch for name, source in self.sources.items()}

    def snapshot(self, offset: int) -> ActorSnapshot:
        """Returns the state, in which every record before ``offset`` has been applied."""
        self._saved_epochs = {name: source.next_epoch for name, source in self.sources.items()}
        return ActorSnapshot(
            offset=offset,
            published=self.published,
            units=self.units,
            dropped=self.dropped,
            by_domain=dict(self.by_domain),
            resolved_by_domain=dict(self.resolved_by_domain),
            before=self.before,
            later=tuple(sorted(self._later)),
            domains={
                name: DomainSnapshot(
                    next_epoch=source.next_epoch,
                    epochs=source.progress(),
                    removed=tuple(sorted(source.removed)),
                    pass_counts=self._pass_counts[name],
                    history=source.sampler.history() if source.sampler is not None else {},
                )
                for name, source in self.sources.items()
            },
        )

    def restore(self, snapshot: ActorSnapshot) -> None:
        """Adopts a snapshot. Afterwards apply the records from its offset on, then call ``resume``."""
        self.published, self.dropped = snapshot.published, snapshot.dropped
        self.units = snapshot.published if snapshot.units is None else snapshot.units
        self.by_domain = Counter(snapshot.by_domain)
        self.resolved_by_domain = Counter(snapshot.resolved_by_domain)
        self.before, self._later = snapshot.before, set(snapshot.later)
        for name, domain in snapshot.domains.items():
            if name in self.sources:
                self._pass_counts[name] = dict(domain.pass_counts)
                source = self.sources[name]
                if source.sampler is not None:
                    source.sampler.restore(domain.history)
                source.restore(next_epoch=domain.next_epoch, progress=domain.epochs, removed=domain.removed)

    def forget_in_flight(self) -> None:
        """Forgets unresolved dispatches, because none of them runs. Their numbers and problems become free again."""
        self.dispatched = self.published + self.dropped
        self._next = self.before


def save_snapshot(folder: Path, snapshot: ActorSnapshot) -> None:
    """Replaces the snapshot atomically. Raises ``StreamError`` if it cannot be written."""
    path, payload = folder / SNAPSHOT_FILE, msgspec.msgpack.encode(snapshot)
    try:
        make_folder(folder)
        replace_file(path, framed(0, payload), mode=0o600, sync=True)
    except OSError as error:
        raise StreamError(f"{path} cannot be written: {error}") from error


def load_snapshot(folder: Path) -> ActorSnapshot | None:
    """Loads the newest snapshot. Returns None if there is none. Raises ``CorruptStreamError`` if it is damaged."""
    path = folder / SNAPSHOT_FILE
    try:
        return msgspec.msgpack.decode(only_payload(path.read_bytes()), type=ActorSnapshot)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, CorruptStreamError) as error:
        raise CorruptStreamError(f"{path} is damaged ({error})") from error


class TopicJournal:
    """Publishes on topic ``actor`` and keeps a snapshot of the progress that the records add up to.

    Args:
        folder: the job's folder, for the snapshot.
        cursor: reader that protects records from deletion until a snapshot covers them. None: nothing is deleted.
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
        """Writes the first record of an empty topic, after a restart from a checkpoint."""
        self._answers.clear()  # the weights that sampled them may be lost
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
        self._answers.flush()  # a restart applies no record before the snapshot, so it would not remove them
        self._groups.sync()
        save_snapshot(self._folder, self._progress.snapshot(offset))
        if self._cursor is not None:
            self._cursor.commit(offset)
        self._next_save = time.monotonic() + SAVE_EVERY_S

    def _apply(self, record: ActorRecord) -> None:
        self._progress.apply(record)
        if not isinstance(record, OrderResumed):
            self._answers.resolve(record.group_id, range(record.attempts))
