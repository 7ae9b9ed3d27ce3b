"""Reads topic `actor` in order. Checks every group and turns it into samples.

A group that `records.check` refuses is never trained: its rollouts become samples with the drop reason `invalid`. A
`GroupDropped` is the actor's own record of a drop and yields no samples.
"""

import json
import logging
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelinerl.errors import RecordError
from pipelinerl.preprocess.samples import Sample, Shaping, Source, prepare_group, refused_group
from pipelinerl.records import ActorRecord, DataOrder, OrderResumed, RolloutGroup
from pipelinerl.records.check import check_group
from pipelinerl.records.order import OrderFold
from pipelinerl.streams import TopicReader

log = logging.getLogger(__name__)

TakenTurn = tuple[str, int, int, int]
"""Domain, epoch, number of the turn in the epoch, number of turns in the epoch."""


class GroupReader:
    """Reads samples from ``source`` on.

    Args:
        reader: of topic `actor`, positioned at ``source[0]``.
        source: first rollout to read.
        shaping: determines how a group becomes samples.
        vocab_size: token ids must be below it.
        attempts: largest number of rollouts in a group.
        order: which problems are settled at ``source``.
        num_actors: number of actors that take turns in an epoch.
    """

    def __init__(
        self,
        reader: TopicReader[ActorRecord],
        source: Source,
        *,
        shaping: Shaping,
        vocab_size: int,
        attempts: int,
        order: DataOrder | None = None,
        num_actors: int = 1,
    ):
        self.resumed: OrderResumed | None = None
        """The record that opens the stream of a run resumed from a checkpoint. None until it was read."""
        self._order = OrderFold(order)
        self._num_actors = num_actors
        self._unsettled: deque[tuple[int, TakenTurn]] = deque()
        self._reader = reader
        self._source = source
        self._shaping = shaping
        self._vocab_size = vocab_size
        self._attempts = attempts

    @property
    def position(self) -> int:
        """Offset of the next record to read."""
        return self._reader.position

    def poll(self, timeout_s: float) -> list[list[Sample]]:
        """Samples of the next groups, one list per group. Empty if none arrives within ``timeout_s``."""
        return list(self._groups(self._reader.poll(timeout_s)))

    def commit(self, source: Source) -> None:
        """Release the groups before ``source``."""
        self._reader.commit(source[0])

    def settle(self, source: Source, domains: Iterable[str]) -> DataOrder:
        """Mark the problems before ``source`` as settled, and return all that are settled.

        Args:
            source: place where the next batch begins.
            domains: domain of each sample of the batch before it.
        """
        self._order.count(domains)
        while self._unsettled and (self._unsettled[0][0], 0) < source:
            self._order.settle(*self._unsettled.popleft()[1])
        return self._order.to_record()

    def barrier(self) -> None:
        """Ensure that nothing written from now on becomes durable before the groups that were read."""
        self._reader.barrier()

    def close(self) -> None:
        self._reader.close()

    def _groups(self, records: list[tuple[int, Any]]) -> Iterable[list[Sample]]:
        for offset, record in records:
            if isinstance(record, OrderResumed):
                self.resumed, self._order = record, OrderFold(record.order)
                continue
            turn = record.position // self._num_actors
            self._unsettled.append((offset, (record.domain, record.epoch, turn, record.epoch_size)))
            if isinstance(record, RolloutGroup):
                samples = [sample for sample in self._prepare(offset, record) if sample.source >= self._source]
                if samples:
                    yield samples

    def _prepare(self, offset: int, group: RolloutGroup) -> list[Sample]:
        try:
            check_group(group, vocab_size=self._vocab_size, attempts=self._attempts)
            return prepare_group(offset, group, self._shaping)
        except RecordError as error:
            log.warning("event=group_refused group=%s offset=%d reason=%s", group.group_id, offset, error)
            return refused_group(offset, group)


def read_vocab_size(model_path: str) -> int:
    """Vocabulary size of a model in a local folder or on the Hugging Face hub."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(model_path, "config.json"))
    config = json.loads(path.read_text())
    return int({**config, **config.get("text_config", {})}["vocab_size"])
