"""Topic `actor` in order: every group checked and prepared, or refused with its identity.

A group that `records.check` refuses reaches no gradient: its rollouts become samples with the reason `invalid`. A
`GroupDropped` is the actor's own account and yields nothing here.
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
"""Domain, epoch, number of the turn in it, turns of the epoch."""


class GroupReader:
    """Reads samples from ``source`` on.

    Args:
        reader: topic `actor`, placed at ``source[0]``.
        source: first rollout that is wanted.
        vocab_size: token ids must be below it.
        attempts: rollouts that a group may have at most.
        order: what is settled at ``source``.
        num_actors: actors that take turns in an epoch.
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
        """The record that began this stream after a checkpoint, once it was read."""
        self._order = OrderFold(order)
        self._num_actors = num_actors
        self._unsettled: deque[tuple[int, TakenTurn]] = deque()
        self._reader = reader
        self._source = source
        self._shaping = shaping
        self._vocab_size = vocab_size
        self._attempts = attempts

    def poll(self, timeout_s: float) -> list[list[Sample]]:
        """Samples of the next groups, one list per group; empty when none came within ``timeout_s``."""
        return list(self._groups(self._reader.poll(timeout_s)))

    def commit(self, source: Source) -> None:
        """Nothing before ``source`` is needed any more."""
        self._reader.commit(source[0])

    def settle(self, source: Source, domains: Iterable[str]) -> DataOrder:
        """What is settled once everything before ``source`` is.

        Args:
            source: where the next batch begins.
            domains: one name per sample of the batch before it.
        """
        self._order.count(domains)
        while self._unsettled and (self._unsettled[0][0], 0) < source:
            self._order.settle(*self._unsettled.popleft()[1])
        return self._order.to_record()

    def barrier(self) -> None:
        """What is written from now on becomes durable only after the groups that were read."""
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
            log.warning("group refused group=%s offset=%d reason=%s", group.group_id, offset, error)
            return refused_group(offset, group)


def read_vocab_size(model_path: str) -> int:
    """Vocabulary of a model folder or of a model on the Hugging Face hub."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(model_path, "config.json"))
    config = json.loads(path.read_text())
    return int({**config, **config.get("text_config", {})}["vocab_size"])
