"""The actor's settled work, computed as a fold over its own records, so that a restart continues after the last one.

The same ``apply`` counts records during the run and after a restart. A snapshot in the job's folder holds the fold up
to an offset of topic ``actor``. A restart reads the later records from the topic, which keeps them until a snapshot
covers them. A dispatch without a record is not settled: its problem is dispatched again first.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pipelinerl.actor.problems import EpochProgress, Place, ProblemSource
from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.host.disk import make_folder, replace_file
from pipelinerl.records import ActorRecord, OrderResumed, RolloutGroup
from pipelinerl.records.order import DomainOrder

SNAPSHOT_FILE = "progress.msgpack"


class DomainSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One domain's place in its problems."""

    next_epoch: int
    epochs: tuple[EpochProgress, ...]
    removed: tuple[int, ...]
    pass_counts: dict[int, tuple[int, int]]
    """Problem index → (successes, attempts). Kept only with no-positive-resampling."""


class ActorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The fold over all records of this actor before ``offset``."""

    offset: int
    published: int
    dropped: int
    by_domain: dict[str, int]
    settled_by_domain: dict[str, int]
    before: int
    later: tuple[int, ...]
    domains: dict[str, DomainSnapshot]


class ActorProgress:
    """Counts samples, assigns dispatch numbers, and tracks every domain's place in its problems.

    Args:
        sources: the problems of each domain, by name.
        no_positive_resampling: success rate from which a problem leaves the pool. None: problems never leave.

    Example:
        >>> progress = ActorProgress({"guessing": ProblemSource(num_problems=2, seed=0, name="guessing")})
        >>> progress.dispatch(8), progress.dispatch(8), progress.dispatched
        (0, 1, 16)
    """

    def __init__(self, sources: Mapping[str, ProblemSource], no_positive_resampling: float | None = None):
        self.sources = dict(sources)
        self.dispatched = 0
        """Samples dispatched."""
        self.published = 0
        """Samples published."""
        self.dropped = 0
        """Samples dispatched that will never be published."""
        self.by_domain: Counter[str] = Counter()
        """Samples published per domain."""
        self.settled_by_domain: Counter[str] = Counter()
        """Samples published or dropped per domain."""
        self.before = 0
        """Every dispatch with a lower number is published or dropped."""
        self._later: set[int] = set()
        self._next = 0
        self._threshold = no_positive_resampling
        self._pass_counts: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in self.sources}
        self._saved_epochs: dict[str, int] | None = None

    def dispatch(self, samples: int) -> int:
        """Counts a dispatch and returns its number, the lowest that is neither settled nor assigned."""
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
        self.dropped += record.attempts - len(rollouts)
        self.by_domain[record.domain] += len(rollouts)
        self.settled_by_domain[record.domain] += record.attempts
        self._later.add(record.dispatch_index)
        while self.before in self._later:
            self._later.remove(self.before)
            self.before += 1
        source = self.sources.get(record.domain)
        if source is not None:
            place = Place(epoch=record.epoch, position=record.position, problem_index=record.problem_index)
            source.settle(place)
            successes = sum(rollout.metrics.get("success", 0.0) > 0 for rollout in rollouts)
            self._count_passes(source, record.domain, record.problem_index, successes, len(rollouts))

    def _begin(self, record: OrderResumed) -> None:
        self.published, self.dropped = record.published, 0
        for name, source in self.sources.items():
            order = record.order.domains.get(name, DomainOrder())
            self.by_domain[name] = self.settled_by_domain[name] = order.samples
            source.resume(order, record.removed.get(name, ()), record.removed_at.get(name, {}))

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
            dropped=self.dropped,
            by_domain=dict(self.by_domain),
            settled_by_domain=dict(self.settled_by_domain),
            before=self.before,
            later=tuple(sorted(self._later)),
            domains={
                name: DomainSnapshot(
                    next_epoch=source.next_epoch,
                    epochs=source.progress(),
                    removed=tuple(sorted(source.removed)),
                    pass_counts=self._pass_counts[name],
                )
                for name, source in self.sources.items()
            },
        )

    def restore(self, snapshot: ActorSnapshot) -> None:
        """Adopts a snapshot. Afterwards apply the records from its offset on, then call ``resume``."""
        self.published, self.dropped = snapshot.published, snapshot.dropped
        self.by_domain = Counter(snapshot.by_domain)
        self.settled_by_domain = Counter(snapshot.settled_by_domain)
        self.before, self._later = snapshot.before, set(snapshot.later)
        for name, domain in snapshot.domains.items():
            if name in self.sources:
                self._pass_counts[name] = dict(domain.pass_counts)
                self.sources[name].restore(next_epoch=domain.next_epoch, progress=domain.epochs, removed=domain.removed)

    def resume(self) -> None:
        """Forgets unsettled dispatches, because none of them runs. Their numbers and problems become free again."""
        self.dispatched = self.published + self.dropped
        self._next = self.before


def save_snapshot(folder: Path, snapshot: ActorSnapshot) -> None:
    """Replaces the snapshot atomically. Raises ``StreamError`` if it cannot be written."""
    path = folder / SNAPSHOT_FILE
    try:
        make_folder(folder)
        replace_file(path, msgspec.msgpack.encode(snapshot), mode=0o600, sync=True)
    except OSError as error:
        raise StreamError(f"{path} cannot be written: {error}") from error


def load_snapshot(folder: Path) -> ActorSnapshot | None:
    """Loads the newest snapshot. Returns None if there is none. Raises ``CorruptStreamError`` if it is damaged."""
    path = folder / SNAPSHOT_FILE
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=ActorSnapshot)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise CorruptStreamError(f"{path} is damaged ({error})") from error
