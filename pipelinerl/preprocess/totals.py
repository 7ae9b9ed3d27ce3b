"""The preprocessor's totals and its position in the run. A restart reads them from topic `preprocessor`. Pure.

A record is written after every published batch and whenever rollouts were dropped. ``source`` is the place where the
current batch begins, from which a restart reads on. Totals include drops only up to ``counted_until``.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.samples import Sample, Source
from pipelinerl.records import DataOrder, PreprocessorProgress
from pipelinerl.records.drops import DropReason


@dataclass(kw_only=True)
class Totals:
    """Counts since the start of the run. ``pending``: (sample, reason) of the drops that are in no record yet."""

    step: int = 0
    source: Source = (0, 0)
    counted_until: Source = (0, 0)
    samples_packed: int = 0
    room: int = 0
    """Units of the batch size that were read and fill no batch (``PreprocessorProgress.room``)."""
    order: DataOrder = field(default_factory=DataOrder)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_by_domain: Counter[str] = field(default_factory=Counter)
    pending: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def restore(cls, last: PreprocessorProgress | None) -> "Totals":
        """Totals of the last record, or zeros if there is none."""
        if last is None:
            return cls()
        return cls(
            step=last.step,
            source=last.source,
            counted_until=last.counted_until,
            samples_packed=last.samples_packed,
            room=last.samples_dropped if last.room is None else last.room,
            order=last.order or DataOrder(),
            dropped=Counter(last.dropped_by_reason),
            dropped_by_domain=Counter(last.dropped_by_domain),
        )

    def resume_at(self, step: int) -> None:
        """Begin with the step of the checkpoint from which the run was resumed."""
        self.step = step

    def decided(self, sample: Sample, drop_reason: DropReason | None) -> bool:
        """Count a sample's outcome. False if it was counted before the restart. ``drop_reason`` None: packed."""
        if sample.after <= self.counted_until:
            return False
        self.counted_until = sample.after
        if drop_reason is not None:
            self.dropped[drop_reason] += 1
            self.room += sample.size
            self.dropped_by_domain[sample.domain] += 1
            self.pending.append((sample.sample_id, drop_reason))
        return True

    def published(self, batch: OptimizerBatch, order: DataOrder) -> None:
        """Count an optimizer batch that was written to `training_data`. ``order``: what is resolved behind it."""
        self.order = order
        self.step = batch.step + 1
        self.source = batch.next_source
        self.samples_packed += batch.size
        self.room += batch.excess

    def to_record(self, packed_sample_ids: Sequence[str] = ()) -> PreprocessorProgress:
        """Make the record to write, and empty ``pending``."""
        record = PreprocessorProgress(
            samples_packed=self.samples_packed,
            samples_dropped=self.dropped.total(),
            room=self.room,
            dropped_by_reason=dict(self.dropped),
            step=self.step,
            dropped_sample_ids=tuple(self.pending),
            dropped_by_domain=dict(self.dropped_by_domain),
            packed_sample_ids=tuple(packed_sample_ids),
            source=self.source,
            order=self.order,
            counted_until=self.counted_until,
        )
        self.pending = []
        return record


def next_own_step(step: int, replica: int, num_replicas: int) -> int:
    """The first step from ``step`` on with step % ``num_replicas`` == ``replica``, which this preprocessor packs."""
    return step + (replica - step) % num_replicas
