"""Reads groups in the order of topic `actor` and has them scored by the reference model if the loss needs it.

Consumes: topic `actor` of one replica. Waits for: the next group, and for reference log-probs when
`preprocess.reference_concurrency` groups are pending. Samples leave in the order of the topic. A group that
`records.check` refuses becomes samples with the drop reason `malformed`.
"""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipelinerl.config.sections import Config
from pipelinerl.config.servers import ScoringModel, scoring_models, side_models
from pipelinerl.errors import RecordError
from pipelinerl.membership.role import RoleContext
from pipelinerl.observability.status import CurrentWait
from pipelinerl.preprocess.reference import ReferenceScorer, check_placed, merged, servers_of
from pipelinerl.preprocess.samples import Sample, Shaping, Source, count_peers, prepare_group, refused_group
from pipelinerl.records import ActorRecord, DataOrder, GroupOutcome, OrderResumed, RolloutGroup, outcome_of
from pipelinerl.records.check import check_group
from pipelinerl.records.order import OrderFold
from pipelinerl.records.topics import ACTOR
from pipelinerl.streams import SingleStreamSpec, TopicReader, open_reader

log = logging.getLogger(__name__)

TakenTurn = tuple[str, int, int, int]
"""Domain, epoch, number of the turn in the epoch, number of turns in the epoch."""


class _Unresolved(NamedTuple):
    offset: int
    turn: TakenTurn
    outcome: GroupOutcome | None
    """None: not needed, or already in ``order``, because a part of the group is trained."""


class GroupReader:
    """Reads samples from ``source`` on.

    Args:
        reader: of topic `actor`, positioned at ``source[0]``.
        source: first rollout to read.
        vocab_size: token ids must be below it.
        attempts: largest number of rollouts in a group.
        order: which problems are resolved at ``source``.
        num_actors: number of actors that take turns in an epoch.
        keeps_history: whether the resolved order has the policy's results on each problem, for `actor.sampler`.
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
        keeps_history: bool = False,
    ):
        self.resumed: OrderResumed | None = None
        """The record that opens the stream of a run resumed from a checkpoint. None until it was read."""
        self._order = OrderFold(order)
        self._num_actors, self._keeps_history = num_actors, keeps_history
        self._unresolved: deque[_Unresolved] = deque()
        self._reader = reader
        self.source = source
        self._shaping = shaping
        self._vocab_size = vocab_size
        self._attempts = attempts

    @property
    def position(self) -> int:
        """Offset of the next record to read."""
        return self._reader.position

    def poll(self, timeout_s: float) -> list[list[Sample]]:
        """Samples of the next groups, one list per group. Empty if none arrives within ``timeout_s``.

        The first group may begin before the source.
        """
        return list(self._groups(self._reader.poll(timeout_s)))

    def commit(self, source: Source) -> None:
        """Release the groups before ``source``."""
        self._reader.commit(source[0])

    def resolve_before(self, source: Source, domains: Iterable[str]) -> DataOrder:
        """Mark the problems before ``source``, where the next batch begins, as resolved. Returns all resolved ones.

        ``domains``: domain of each sample of the batch before it.
        """
        self._order.count(domains)
        while self._unresolved and (self._unresolved[0].offset, 0) < source:
            group = self._unresolved.popleft()
            self._order.mark_resolved(*group.turn)
            if group.outcome is not None:
                self._order.observe(group.turn[0], group.outcome)
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
            outcome = outcome_of(record) if self._keeps_history and (offset, 0) >= self.source else None
            self._unresolved.append(
                _Unresolved(offset, (record.domain, record.epoch, turn, record.epoch_size), outcome)
            )
            if isinstance(record, RolloutGroup):
                samples = self._prepare(offset, record)
                if samples and samples[-1].source >= self.source:
                    yield samples

    def _prepare(self, offset: int, group: RolloutGroup) -> list[Sample]:
        try:
            check_group(group, vocab_size=self._vocab_size, attempts=self._attempts)
            return prepare_group(offset, group, self._shaping)
        except RecordError as error:
            log.warning("event=group_refused group=%s offset=%d reason=%s", group.group_id, offset, error)
            return refused_group(offset, group, self._shaping.unit)


def read_vocab_size(model_path: str) -> int:
    """Vocabulary size of a model in a local folder or on the Hugging Face hub."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(model_path, "config.json"))
    config = json.loads(path.read_text(encoding="utf-8"))
    return int({**config, **config.get("text_config", {})}["vocab_size"])


IDLE_POLL_S = 0.5
"""Longest read of the topic, after which the loop sees that it was asked to stop."""
BUSY_POLL_S = 0.05
"""The same while something else may be ready meanwhile. Batches take seconds."""


@dataclass
class _Pending:
    """A group that was read but not taken. ``scored``: its samples as each scoring model returns them."""

    samples: list[Sample]
    scored: list[Future[list[Sample]]]

    @property
    def ready(self) -> bool:
        return all(future.done() for future in self.scored)


class Intake:
    """Reads the groups from ``source`` on and has them scored. ``order``: what is resolved at ``source``."""

    def __init__(self, ctx: RoleContext, source: Source, order: DataOrder):
        self._ctx = ctx
        self._concurrency = ctx.cfg.preprocess.reference_concurrency
        self._groups = open_groups(ctx, source, order)
        self._pending: deque[_Pending] = deque()
        self._models = scoring_models(ctx.cfg)
        self._scorers = [make_scorer(ctx, model) for model in self._models]
        self._wait = CurrentWait(ctx.status)
        self.is_exhausted = False
        """Whether the last read found no group and none is pending."""

    @property
    def is_scoring(self) -> bool:
        """Whether samples are given log-probs of a reference or teachers."""
        return bool(self._scorers)

    def read(self) -> None:
        """Read groups from the actor, unless too many still wait for their reference log-probs."""
        if self._pending:
            self._wait.be("reference log-probs", on="preprocessor_llm")
        else:
            self._wait.be("the next group", on=f"actor_{self._ctx.job.replica_idx}")
        if len(self._pending) >= self._concurrency:
            self._ctx.stop.wait(BUSY_POLL_S)
        else:
            self._read_groups(BUSY_POLL_S if self._pending else IDLE_POLL_S)
        if self._pending and self._pending[0].ready:
            self._wait.end()

    def _read_groups(self, timeout_s: float) -> None:
        before = self._groups.position
        groups = self._groups.poll(timeout_s)
        self.is_exhausted = self._groups.position == before and not self._pending
        for samples in groups:
            self._pending.append(_Pending(samples, [scorer.submit(samples) for scorer in self._scorers]))

    def next_samples(self) -> Iterator[Sample]:
        """Samples of the oldest groups that are ready, in order. Waits for nothing.

        Exhaust the iterator: a role that stops within a group reads it again after the restart.
        """
        while self._pending and self._pending[0].ready and not self._ctx.stop.is_set():
            group = self._pending.popleft()
            scored = [future.result() for future in group.scored]
            samples = count_peers(merged(scored, self._models)) if scored else group.samples
            yield from (sample for sample in samples if sample.source >= self._groups.source)

    @property
    def resumed(self) -> OrderResumed | None:
        """The record that opens the topic of a run resumed from a checkpoint. None until it was read."""
        return self._groups.resumed

    def resolve_before(self, source: Source, domains: Sequence[str]) -> DataOrder:
        """As ``GroupReader.resolve_before``."""
        return self._groups.resolve_before(source, domains)

    def commit(self, source: Source) -> None:
        """Release the groups before ``source``."""
        self._groups.commit(source)

    def barrier(self) -> None:
        """Ensure that nothing written from now on becomes durable before the groups that were read."""
        self._groups.barrier()

    def close(self) -> None:
        self._wait.end()
        for scorer in self._scorers:
            scorer.close()
        self._groups.close()


def open_groups(ctx: RoleContext, source: Source, order: DataOrder) -> GroupReader:
    """Open this replica's topic `actor` at ``source``. ``order``: what is resolved there."""
    spec = SingleStreamSpec(ctx.run_dir, ACTOR, ctx.job.replica_idx)
    return GroupReader(
        open_reader(spec, ActorRecord, name=ctx.job.name, start=source[0]),
        source,
        shaping=shaping_from_config(ctx.cfg),
        vocab_size=read_vocab_size(ctx.cfg.model_path),
        attempts=ctx.cfg.attempts,
        order=order,
        num_actors=max(len(ctx.world.get("preprocessor")), 1),
        keeps_history=ctx.cfg.actor.sampler is not None,
    )


def make_scorer(ctx: RoleContext, model: ScoringModel) -> ReferenceScorer:
    """Make the scorer on the servers of one of the run's models."""
    models = side_models(ctx.cfg)
    check_placed(servers_of(ctx.world.servers_of(ctx.job), models, model), model)
    view, replica = ctx.server_view, ctx.job.replica_idx
    return ReferenceScorer(
        lambda: servers_of((one.job for one in view.servers("preprocessor_llm", replica).values()), models, model),
        concurrency=ctx.cfg.preprocess.reference_concurrency,
        deadline_s=ctx.cfg.launcher.startup_timeout_s,
        model=model,
    )


def shaping_from_config(cfg: Config) -> Shaping:
    """The part of the configuration that determines how a group becomes samples."""
    return Shaping(
        advantage=cfg.finetune.rl.advantage,
        advantage_kwargs=cfg.finetune.rl.advantage_kwargs,
        reward_weights=cfg.finetune.rl.reward_weights,
        step_discount=cfg.finetune.rl.step_discount,
        seq_length=cfg.finetune.seq_length,
        filter_zero_advantage_groups=cfg.preprocess.filter_zero_advantage_groups,
        overlong_filtering=cfg.preprocess.overlong_filtering,
        overlong_buffer_tokens=cfg.preprocess.overlong_buffer_tokens,
        max_tokens=int(cfg.llm.parameters["max_tokens"]),
        unit=cfg.finetune.batch_unit,
    )
