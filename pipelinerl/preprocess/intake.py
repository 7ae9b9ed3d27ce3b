"""Groups on their way to the batch, in the order of topic `actor`; those that need a reference are scored meanwhile.

Consumes: topic `actor` of one replica. Waits for: the next group, and reference log-probs once as many groups wait for
them as `preprocess.reference_concurrency` allows. A group leaves only after all before it.
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
    """A group on its way to the batch; ``scored`` while its reference log-probs are being computed."""

    samples: list[Sample]
    scored: Future[list[Sample]] | None = None

    @property
    def ready(self) -> bool:
        return self.scored is None or self.scored.done()


class Intake:
    """Reads, and has scored, the groups from ``source`` on, where ``order`` says what is settled."""

    def __init__(self, ctx: RoleContext, source: Source, order: DataOrder):
        self._ctx = ctx
        self._concurrency = ctx.cfg.preprocess.reference_concurrency
        self._groups = open_groups(ctx, source, order)
        self._pending: deque[_Pending] = deque()
        self._scorer = make_scorer(ctx)

    @property
    def is_scoring(self) -> bool:
        """Whether samples get reference log-probs."""
        return self._scorer is not None

    def read(self) -> None:
        """Take groups from the actor, unless enough of them wait for their reference log-probs."""
        if len(self._pending) >= self._concurrency:
            with self._ctx.status.waiting("reference log-probs", on="preprocessor_llm"):
                self._ctx.stop.wait(BUSY_POLL_S)
            return
        with self._ctx.status.waiting("the next group", on=f"actor_{self._ctx.job.replica_idx}"):
            groups = self._groups.poll(BUSY_POLL_S if self._pending else IDLE_POLL_S)
        for samples in groups:
            self._pending.append(_Pending(samples, self._scorer.submit(samples) if self._scorer else None))

    def take(self) -> Iterator[Sample]:
        """Samples of the oldest groups, as far as they are ready.

        A group that is begun is ended, unless the iteration is left: then the role stops and reads it again.
        """
        while self._pending and self._pending[0].ready and not self._ctx.stop.is_set():
            group = self._pending.popleft()
            yield from group.samples if group.scored is None else group.scored.result()

    @property
    def resumed(self) -> OrderResumed | None:
        """The record with which the topic begins after a checkpoint, once it was read."""
        return self._groups.resumed

    def settle(self, source: Source, domains: Sequence[str]) -> DataOrder:
        """What is settled before ``source``, where the next batch begins; ``domains`` of the samples of this one."""
        return self._groups.settle(source, domains)

    def commit(self, source: Source) -> None:
        """Nothing before ``source`` is needed any more."""
        self._groups.commit(source)

    def barrier(self) -> None:
        """What is written from now on becomes durable only after the groups that were read."""
        self._groups.barrier()

    def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
        self._groups.close()


def open_groups(ctx: RoleContext, source: Source, order: DataOrder) -> GroupReader:
    """This replica's topic `actor`, placed at ``source``."""
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
    """The way to the reference servers; None without a KL term."""
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
    """What decides about a group."""
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
