"""Topic `actor` in order: every group checked and prepared, or refused with its identity.

A group that `records.check` refuses reaches no gradient: its rollouts become samples with the reason `invalid`. A
`GroupDropped` is the actor's own account and yields nothing here.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelinerl.errors import RecordError
from pipelinerl.preprocess.samples import Sample, Shaping, Source, prepare_group, refused_group
from pipelinerl.records import ActorRecord, RolloutGroup
from pipelinerl.records.check import check_group
from pipelinerl.streams import TopicReader

log = logging.getLogger(__name__)


class GroupReader:
    """Reads samples from ``source`` on.

    Args:
        reader: topic `actor`, placed at ``source[0]``.
        source: first rollout that is wanted.
        vocab_size: size of the model's vocabulary; None = token ids have no upper bound here.
        attempts: rollouts that a group may have at most.
    """

    def __init__(
        self,
        reader: TopicReader[ActorRecord],
        source: Source,
        *,
        shaping: Shaping,
        vocab_size: int | None,
        attempts: int,
    ):
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

    def close(self) -> None:
        self._reader.close()

    def _groups(self, records: list[tuple[int, Any]]) -> Iterable[list[Sample]]:
        for offset, record in records:
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


def read_vocab_size(model_path: str) -> int | None:
    """Vocabulary of a model folder; None where it is not a local folder (the trainer checks token ids again)."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    size = {**config, **config.get("text_config", {})}.get("vocab_size")
    return int(size) if size is not None else None
