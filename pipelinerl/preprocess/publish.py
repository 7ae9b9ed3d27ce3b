"""Writes optimizer batches to topic `training_data`, one partition per trainer rank, each micro-batch exactly once.

A preprocessor that died while it published a batch rebuilds the same batch; what a partition already holds is skipped.
With sequence parallelism the ranks of a group work on the same micro-batch, so each of their partitions gets it.
"""

from collections.abc import Sequence
from pathlib import Path

from pipelinerl.errors import CorruptStreamError
from pipelinerl.records import MicroBatch
from pipelinerl.records.topics import TRAINING_DATA
from pipelinerl.streams import StreamRangeSpec, TopicWriter, open_writer


class MicroBatchPublisher:
    """The writer of all partitions of one preprocessor."""

    def __init__(self, run_dir: Path, *, instance: int, num_partitions: int, ranks_per_batch: int = 1):
        """``ranks_per_batch``: trainer ranks that share a micro-batch (`finetune.seq_parallel`)."""
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
        """Refuses to go on when a partition lacks a step that topic `preprocessor` says was published."""
        for writer, (step, _) in zip(self._writers, self._last, strict=True):
            if last_step is not None and step < last_step and (step >= 0 or writer.next_offset == 0):
                raise CorruptStreamError(
                    f"{writer.spec} ends with step {step}, but step {last_step} was published: records were lost (a "
                    "power cut with streams.fsync=never?)"
                )

    def publish(self, batches: Sequence[Sequence[MicroBatch]]) -> int:
        """Writes the micro-batches of each data-parallel rank, round by round; returns how many were new."""
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
        """What is written from now on becomes durable only after the micro-batches that were published."""
        for writer in self._writers:
            writer.barrier()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _last_key(writer: TopicWriter[MicroBatch]) -> tuple[int, int]:
    last = writer.last()
    return (last[1].step, last[1].index) if last is not None else (-1, -1)
