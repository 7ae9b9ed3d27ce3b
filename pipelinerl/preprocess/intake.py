"""Reads groups in the order of topic `actor` and has them scored by the reference model if the loss needs it.

Consumes: topic `actor` of one replica. Waits for: the next group, and for reference log-probs when
`preprocess.reference_concurrency` groups are pending. Samples leave in the order of the topic, however long each group
takes to score.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from pipelinerl.config.sections import Config
from pipelinerl.observability.role import RoleContext
from pipelinerl.preprocess.reader import GroupReader, read_vocab_size
from pipelinerl.preprocess.reference import ReferenceScorer, check_placed, needs_reference
from pipelinerl.preprocess.samples import Sample, Shaping, Source
from pipelinerl.records import ActorRecord, DataOrder, OrderResumed
from pipelinerl.records.topics import ACTOR
from pipelinerl.streams import SingleStreamSpec, open_reader

IDLE_POLL_S = 0.5
BUSY_POLL_S = 0.05


@dataclass
class _Pending:
    """A group that was read but not taken. ``scored``: future of its scored samples. None without a KL term."""

    samples: list[Sample]
    scored: Future[list[Sample]] | None = None

    @property
    def ready(self) -> bool:
        return self.scored is None or self.scored.done()


class Intake:
    """Reads the groups from ``source`` on and has them scored. ``order``: what is settled at ``source``."""

    def __init__(self, ctx: RoleContext, source: Source, order: DataOrder):
        self._ctx = ctx
        self._concurrency = ctx.cfg.preprocess.reference_concurrency
        self._groups = open_groups(ctx, source, order)
        self._pending: deque[_Pending] = deque()
        self._scorer = make_scorer(ctx)
        self.is_exhausted = False
        """Whether the last read found no more groups and none is pending."""

    @property
    def is_scoring(self) -> bool:
        """Whether samples are given reference log-probs."""
        return self._scorer is not None

    def read(self) -> None:
        """Read groups from the actor, unless too many still wait for their reference log-probs."""
        if len(self._pending) >= self._concurrency:
            with self._ctx.status.waiting("reference log-probs", on="preprocessor_llm"):
                self._ctx.stop.wait(BUSY_POLL_S)
            return
        before = self._groups.position
        with self._ctx.status.waiting("the next group", on=f"actor_{self._ctx.job.replica_idx}"):
            groups = self._groups.poll(BUSY_POLL_S if self._pending else IDLE_POLL_S)
        self.is_exhausted = self._groups.position == before and not self._pending
        for samples in groups:
            self._pending.append(_Pending(samples, self._scorer.submit(samples) if self._scorer else None))

    def take(self) -> Iterator[Sample]:
        """Samples of the oldest groups that are ready, in order. Waits for nothing.

        Exhaust the iterator, so that no group is taken in part. A role that stops within a group reads it again after
        the restart.
        """
        while self._pending and self._pending[0].ready and not self._ctx.stop.is_set():
            group = self._pending.popleft()
            yield from group.samples if group.scored is None else group.scored.result()

    @property
    def resumed(self) -> OrderResumed | None:
        """The record that opens the topic of a run resumed from a checkpoint. None until it was read."""
        return self._groups.resumed

    def settle(self, source: Source, domains: Sequence[str]) -> DataOrder:
        """As ``GroupReader.settle``."""
        return self._groups.settle(source, domains)

    def commit(self, source: Source) -> None:
        """Release the groups before ``source``."""
        self._groups.commit(source)

    def barrier(self) -> None:
        """Ensure that nothing written from now on becomes durable before the groups that were read."""
        self._groups.barrier()

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
        self._groups.close()


def open_groups(ctx: RoleContext, source: Source, order: DataOrder) -> GroupReader:
    """Open this replica's topic `actor` at ``source``. ``order``: what is settled there."""
    spec = SingleStreamSpec(ctx.run_dir, ACTOR, ctx.job.replica_idx)
    return GroupReader(
        open_reader(spec, ActorRecord, name=ctx.job.name, start=source[0]),
        source,
        shaping=shaping_from_config(ctx.cfg),
        vocab_size=read_vocab_size(ctx.cfg.model_path),
        attempts=ctx.cfg.attempts,
        order=order,
        num_actors=max(len(ctx.world.get("preprocessor")), 1),
    )


def make_scorer(ctx: RoleContext) -> ReferenceScorer | None:
    """Make the scorer on the reference servers. None without a KL term."""
    if not needs_reference(ctx.cfg):
        return None
    check_placed(ctx.world.servers_of(ctx.job))
    view, replica = ctx.server_view, ctx.job.replica_idx
    return ReferenceScorer(
        lambda: [server.job for server in view.servers("preprocessor_llm", replica).values()],
        concurrency=ctx.cfg.preprocess.reference_concurrency,
        deadline_s=ctx.cfg.launcher.startup_timeout_s,
    )


def shaping_from_config(cfg: Config) -> Shaping:
    """The part of the configuration that determines how a group becomes samples."""
    return Shaping(
        advantage=cfg.finetune.rl.advantage,
        advantage_kwargs=cfg.finetune.rl.advantage_kwargs,
        step_discount=cfg.finetune.rl.step_discount,
        seq_length=cfg.finetune.seq_length,
        filter_zero_advantage_groups=cfg.preprocess.filter_zero_advantage_groups,
        overlong_filtering=cfg.preprocess.overlong_filtering,
        overlong_buffer_tokens=cfg.preprocess.overlong_buffer_tokens,
        max_tokens=int(cfg.llm.parameters["max_tokens"]),
    )
