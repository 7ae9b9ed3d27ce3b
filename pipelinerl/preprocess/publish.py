"""Writes optimizer batches to topic `training_data`, one partition per trainer rank, each micro-batch exactly once.

A preprocessor that died while it published a batch skips the micro-batches that a partition already holds.
"""

from collections.abc import Sequence
from pathlib import Path

from pipelinerl.errors import CorruptStreamError
from pipelinerl.records import MicroBatch
from pipelinerl.records.topics import TRAINING_DATA
from pipelinerl.streams import StreamRangeSpec, TopicWriter, open_writer


class MicroBatchPublisher:
    """Writes all partitions of one preprocessor."""

    def __init__(self, run_dir: Path, *, instance: int, num_partitions: int, ranks_per_batch: int = 1):
        """Open all partitions, one per trainer rank.

        ``ranks_per_batch``: trainer ranks that share a micro-batch (`finetune.seq_parallel`). Each gets a copy.
        """
        self._ranks_per_batch = ranks_per_batch
        spec = StreamRangeSpec(run_dir, TRAINING_DATA, instance, (0, num_partitions))
        self._writers: list[TopicWriter[MicroBatch]] = []
        try:
            for partition in spec:
                self._writers.append(open_writer(partition, MicroBatch))
        except BaseException:
            self.close()
            raise
        self._last = [_last_key(writer) for writer in self._writers]

    def check_published(self, last_step: int | None) -> None:
        """Raise ``CorruptStreamError`` if a partition lacks a published step.

        ``last_step``: the last one according to topic `preprocessor`. None: none was published.
        """
        for writer, (step, _) in zip(self._writers, self._last, strict=True):
            if last_step is not None and step < last_step and (step >= 0 or writer.next_offset == 0):
                raise CorruptStreamError(
                    f"{writer.spec} ends with step {step}, but step {last_step} was published: records were lost (a "
                    "power cut with streams.fsync=never?)"
                )

    def publish(self, batches: Sequence[Sequence[MicroBatch]]) -> int:
        """Write the micro-batches [data-parallel rank][round] round by round. Returns how many records were new."""
        if len(batches) * self._ranks_per_batch != len(self._writers):
            raise ValueError(
                f"{len(batches)} micro-batch columns × {self._ranks_per_batch} ranks that share one are not the "
                f"{len(self._writers)} trainer ranks: sequences would be trained twice or never"
            )
        written = 0
        for index in range(len(batches[0])):
            for partition, writer in enumerate(self._writers):
                record = batches[partition // self._ranks_per_batch][index]
                if (record.step, record.index) > self._last[partition]:
                    writer.write(record)
                    self._last[partition] = (record.step, record.index)
                    written += 1
        return written

    def barrier(self) -> None:
        """Ensure that nothing written from now on becomes durable before the published micro-batches."""
        for writer in self._writers:
            writer.barrier()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _last_key(writer: TopicWriter[MicroBatch]) -> tuple[int, int]:
    last = writer.last()
    return (last[1].step, last[1].index) if last is not None else (-1, -1)
