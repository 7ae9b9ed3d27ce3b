"""The preprocessor's loop: groups in, optimizer batches out, oldest first.

Consumes: topic `actor` of its own replica, topic `trainer`. Produces: `training_data`, `preprocessor`, metrics.
Waits for: the next group (from the actor), reference log-probs (from the reference servers), and the trainer when
`preprocess.max_ready_steps` packed batches (or a phase of the conventional schedule, if that is more) are ahead of it;
that wait ends by itself, because the trainer then has a batch to train. Ends: when asked to stop. Restarted, it goes on
after its last published batch (see ``progress``).

With several replicas preprocessor r of n reads actor r alone and packs the optimizer steps with step % n == r: each
stays a pure function of one topic, so exactly-once needs no agreement between them, and the trainer takes the steps in
turn.
"""

import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from pipelinerl.archive import open_archive
from pipelinerl.config.sections import Config
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.observability.role import RoleContext
from pipelinerl.preprocess.archiving import RolloutArchive
from pipelinerl.preprocess.batching import BatchCutter, OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.lag import LengthDeciles
from pipelinerl.preprocess.metrics import Survivorship, quality_of, step_metrics, survivorship_line
from pipelinerl.preprocess.progress import Totals, next_own_step
from pipelinerl.preprocess.publish import MicroBatchPublisher
from pipelinerl.preprocess.reader import GroupReader, read_vocab_size
from pipelinerl.preprocess.reference import ReferenceScorer, needs_reference
from pipelinerl.preprocess.samples import LAG, Sample, Shaping
from pipelinerl.records import ActorRecord, ArchivedStep, PreprocessorProgress
from pipelinerl.records.topics import ACTOR, PREPROCESSOR
from pipelinerl.state import TrainerState
from pipelinerl.streams import SingleStreamSpec, TopicWriter, open_reader, open_writer

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
BUSY_POLL_S = 0.05
COMMIT_EVERY_S = 1.0
ROLLOUTS_SHARE = 2 / 3
"""Of the archive's space; the rest is the trainer's."""


def run(ctx: RoleContext) -> None:
    """Runs until ``ctx.stop`` is set."""
    preprocessor = Preprocessor(ctx)
    try:
        while not ctx.stop.is_set():
            preprocessor.turn()
    finally:
        preprocessor.close()


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


def collation_from_config(cfg: Config, num_ranks: int) -> Collation:
    """What decides about an optimizer batch."""
    return Collation(
        num_ranks=num_ranks,
        seq_length=cfg.finetune.seq_length,
        sequences_per_micro_batch=None if cfg.finetune.seq_packing else cfg.finetune.train_batch_size,
        advantage=cfg.finetune.rl.advantage,
        aggregation=cfg.finetune.rl.aggregation,
        with_reference=needs_reference(cfg),
    )


@dataclass
class _Pending:
    """A group on its way to the batch; ``scored`` while its reference log-probs are being computed."""

    samples: list[Sample]
    scored: Future[list[Sample]] | None = None

    @property
    def ready(self) -> bool:
        return self.scored is None or self.scored.done()


class Preprocessor:
    """One replica. ``turn`` does what can be done now and waits at most half a second for more."""

    def __init__(self, ctx: RoleContext):
        cfg, replica = ctx.cfg, ctx.job.replica_idx
        self.ctx, self.cfg = ctx, cfg
        num_replicas = max(len(ctx.world.get("preprocessor")), 1)
        ranks_per_batch = cfg.finetune.seq_parallel
        shaping = shaping_from_config(cfg)
        self.collation = collation_from_config(cfg, ctx.world.trainer_world_size // ranks_per_batch)
        self.progress: TopicWriter[PreprocessorProgress] = open_writer(
            SingleStreamSpec(ctx.run_dir, PREPROCESSOR, replica), PreprocessorProgress
        )
        last = self.progress.last()
        self.totals = Totals.restore(last[1] if last else None)
        self.publisher = MicroBatchPublisher(
            ctx.run_dir,
            instance=replica,
            num_partitions=ctx.world.trainer_world_size,
            ranks_per_batch=ranks_per_batch,
        )
        self.publisher.check_published(self.totals.step - 1 if self.totals.samples_packed else None)
        self.cutter = BatchCutter(
            step=next_own_step(self.totals.step, replica, num_replicas),
            batch_size=cfg.batch_size,
            max_lag_steps=cfg.max_lag_steps,
            lag_drop=cfg.preprocess.lag_drop,
            stride=num_replicas,
        )
        self.groups = self._open_groups(shaping, replica)
        self.pending: deque[_Pending] = deque()
        self.scorer = self._make_scorer()
        self.metrics = MetricsLogger(cfg, ctx.run_dir, ctx.job.kind if replica == 0 else ctx.job.name)
        self.archive = RolloutArchive(
            open_archive(cfg.archive, ctx.run_dir, ctx.job.name, ArchivedStep, share=ROLLOUTS_SHARE / num_replicas)
        )
        self.survivorship = Survivorship()
        self.deciles = LengthDeciles()
        self.ready_steps = max(cfg.preprocess.max_ready_steps, cfg.steps_per_phase, cfg.proximal_steps or 1)
        self.trainer = TrainerState(ctx.run_dir)
        self.trainer.start_listening()
        self.last_publish = self.next_commit = time.monotonic()
        log.info(
            "ready step=%d source=%s packed=%d dropped=%d ranks=%d reference=%s",
            self.cutter.step,
            self.totals.source,
            self.totals.samples_packed,
            self.totals.dropped.total(),
            self.collation.num_ranks,
            self.scorer is not None,
        )

    def turn(self) -> None:
        """Reads, decides, publishes."""
        self._read()
        while self.pending and self.pending[0].ready and not self.ctx.stop.is_set():
            group = self.pending.popleft()
            for sample in group.samples if group.scored is None else group.scored.result():
                self._decide(sample)
        self._report_drops()

    def close(self) -> None:
        if self.scorer is not None:
            self.scorer.close()
        self.trainer.stop()
        self.groups.close()
        self.publisher.close()
        self.progress.close()
        self.metrics.close()

    def _open_groups(self, shaping: Shaping, replica: int) -> GroupReader:
        source = self.totals.source
        reader = open_reader(
            SingleStreamSpec(self.ctx.run_dir, ACTOR, replica), ActorRecord, name=self.ctx.job.name, start=source[0]
        )
        return GroupReader(
            reader,
            source,
            shaping=shaping,
            vocab_size=read_vocab_size(self.cfg.model_path),
            attempts=self.cfg.attempts,
        )

    def _make_scorer(self) -> ReferenceScorer | None:
        if not needs_reference(self.cfg):
            return None
        return ReferenceScorer(
            self.ctx.world.servers_of(self.ctx.job),
            concurrency=self.cfg.preprocess.reference_concurrency,
            deadline_s=self.cfg.launcher.startup_timeout_s,
        )

    def _read(self) -> None:
        """Takes groups from the actor, unless enough of them wait for their reference log-probs."""
        if len(self.pending) >= self.cfg.preprocess.reference_concurrency:
            with self.ctx.status.waiting("reference log-probs", on="preprocessor_llm"):
                self.ctx.stop.wait(BUSY_POLL_S)
            return
        with self.ctx.status.waiting("the next group", on=f"actor_{self.ctx.job.replica_idx}"):
            groups = self.groups.poll(BUSY_POLL_S if self.pending else IDLE_POLL_S)
        for samples in groups:
            self.pending.append(_Pending(samples, self.scorer.submit(samples) if self.scorer else None))

    def _decide(self, sample: Sample) -> None:
        """The sample's fate, and the batch's if it is full now."""
        reason = self.cutter.offer(sample)
        self.archive.add(sample, reason)
        if self.totals.decided(sample, reason) or reason is None:
            self.survivorship.add(sample, reason)
            if reason in (None, LAG):
                lag = self.cutter.step - sample.oldest_version
                self.deciles.add(sample.num_trained, lag, self.cutter.lost_share(sample, reason))
        batch = self.cutter.take()
        if batch is not None and self._wait_for_trainer(batch.step):
            self._publish(batch)

    def _wait_for_trainer(self, step: int) -> bool:
        """Back-pressure; False when asked to stop meanwhile (the batch is rebuilt after the restart)."""
        if not self._too_far_ahead(step):
            return True
        self._report_drops()
        last = step - self.ready_steps - 1
        with self.ctx.status.waiting(f"training of step {last}", on="finetune_0"):
            while self._too_far_ahead(step):
                if self.ctx.stop.wait(BUSY_POLL_S):
                    return False
        return True

    def _too_far_ahead(self, step: int) -> bool:
        steps_trained = (self.trainer.samples_processed or 0) // self.cfg.batch_size
        return step - steps_trained > self.ready_steps

    def _publish(self, batch: OptimizerBatch) -> None:
        """First the data, then the record that says so, then the actor's records may go; on the disk as well."""
        batches = collate(batch, self.collation)
        self.groups.barrier()
        self.publisher.publish(batches)
        self.publisher.barrier()
        self.totals.published(batch.step, len(batch.samples), batch.next_source)
        self.progress.write(self.totals.to_record([sample.sample_id for sample in batch.samples]))
        self.archive.write(batch.step)
        if time.monotonic() >= self.next_commit:
            self._commit()
        self._report(batch, step_metrics(batch, quality_of(batches, self.collation.seq_length)))

    def _commit(self) -> None:
        """Lets go of the groups behind the last published batch."""
        self.progress.barrier()
        self.groups.commit(self.totals.source)
        self.next_commit = time.monotonic() + COMMIT_EVERY_S

    def _report_drops(self) -> None:
        if self.totals.pending:
            self.groups.barrier()
            self.progress.write(self.totals.to_record())

    def _report(self, batch: OptimizerBatch, values: dict[str, float]) -> None:
        now = time.monotonic()
        seconds, self.last_publish = now - self.last_publish, now
        fates = self.survivorship.take() | self.deciles.values()
        warning = self.deciles.warning(self.cfg.max_lag_steps)
        if warning:
            log.warning(warning)
        dropped = {f"dropped/{reason}": count for reason, count in self.totals.dropped.items()}
        self.metrics.log(
            values | fates | dropped | {"tokens_per_s": values["tokens"] / max(seconds, 1e-9)}, step=batch.step
        )
        log.info(
            "packed step=%d samples=%d tokens=%d micro_batches=%d lockstep=%.3f lag_max=%d survivorship: %s",
            batch.step,
            len(batch.samples),
            values["tokens"],
            values["micro_batches"],
            values["lockstep"],
            values["packed_lag_max"],
            survivorship_line(fates),
        )
        self.ctx.status.progress(
            step=batch.step, samples_packed=self.totals.samples_packed, dropped=dict(self.totals.dropped)
        )
