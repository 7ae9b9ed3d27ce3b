"""The preprocessor's loop: groups in, optimizer batches out, oldest first.

Consumes: topic `actor` of its own replica, topic `trainer`. Produces: `training_data`, `preprocessor`, metrics.
Waits for: the next group, reference log-probs, and the trainer when `preprocess.max_ready_steps` packed batches (or a
phase of the conventional schedule, if that is more) are ahead of it. Ends: when asked to stop, and without the rest of
the run at the end of the recorded groups. Of n replicas, r reads only actor r and packs the steps with step % n == r.
"""

import logging
import time
from dataclasses import replace

from pipelinerl.chat.vocabulary import check_same_vocabulary
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import needs_reference, scoring_models
from pipelinerl.membership.role import RoleContext
from pipelinerl.observability import spans
from pipelinerl.observability.archive import open_archive
from pipelinerl.observability.catalogue import PreprocessorMetric
from pipelinerl.preprocess.archiving import RolloutArchive
from pipelinerl.preprocess.batching import BatchCutter, OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate, with_held_out, with_order
from pipelinerl.preprocess.intake import BUSY_POLL_S, Intake
from pipelinerl.preprocess.metrics import BatchReport, batch_metrics, quality_of
from pipelinerl.preprocess.publish import MicroBatchPublisher
from pipelinerl.preprocess.samples import Sample
from pipelinerl.preprocess.supervised import open_held_out, open_supervised
from pipelinerl.preprocess.totals import Totals, next_own_step
from pipelinerl.records import ArchivedStep, MicroBatch, PreprocessorProgress
from pipelinerl.records.topics import PREPROCESSOR
from pipelinerl.state import TrainerState
from pipelinerl.streams import SingleStreamSpec, TopicWriter, open_writer

log = logging.getLogger(__name__)

COMMIT_EVERY_S = 1.0
"""A commit syncs files. What is committed later is only deleted later."""
ROLLOUTS_SHARE = 2 / 3
"""The preprocessors' share of the archive's space. The trainer has the rest."""


def run(ctx: RoleContext) -> None:
    """Run the role until ``ctx.stop`` is set."""
    preprocessor = Preprocessor(ctx)
    ctx.status.progress()  # ready: the first group may take hours to sample
    try:
        while not ctx.stop.is_set() and not preprocessor.is_done:
            preprocessor.turn()
    finally:
        preprocessor.close()


def max_ready_steps(cfg: Config) -> int:
    """Largest number of packed batches that may be ahead of the trainer."""
    return max(cfg.preprocess.max_ready_steps, cfg.steps_per_phase, cfg.proximal_steps or 1)


def record_spans(batch: OptimizerBatch, began: int) -> None:
    """Record the packing of a batch, in the step's trace and in the trace of each rollout."""
    ended = time.time_ns()
    spans.record("pack", f"step {batch.step}", began, ended, step=batch.step)
    for sample in batch.samples:
        spans.record("preprocess", sample.sample_id, began, ended, step=batch.step)


def collation_from_config(cfg: Config, data_parallel_size: int) -> Collation:
    """The settings by which a batch is collated for this number of data-parallel ranks."""
    return Collation(
        data_parallel_size=data_parallel_size,
        seq_length=cfg.finetune.seq_length,
        sequences_per_micro_batch=None if cfg.finetune.seq_packing else cfg.finetune.train_batch_size,
        share_prefixes=cfg.finetune.shares_prefixes,
        advantage=cfg.finetune.rl.advantage,
        aggregation=cfg.finetune.rl.aggregation,
        with_reference=needs_reference(cfg),
        with_teacher=bool(cfg.teachers),
        with_average=any(teacher.ema is not None for teacher in cfg.teachers),
        teacher_top_k=cfg.finetune.rl.teacher_top_k,
        sft_weight=cfg.sft.weight,
    )


class Preprocessor:
    """One replica. ``turn`` does the work that is ready and waits at most half a second for more groups."""

    def __init__(self, ctx: RoleContext):
        cfg, replica = ctx.cfg, ctx.job.replica_idx
        scoring = [model.path for model in scoring_models(cfg)]
        check_same_vocabulary(cfg.model_path, scoring, trust_remote_code=cfg.trust_remote_code)
        self.ctx, self.cfg = ctx, cfg
        self.supervised, self.held_out = open_supervised(cfg), open_held_out(cfg)
        num_replicas = max(len(ctx.world.get("preprocessor")), 1)
        ranks_per_batch = cfg.finetune.seq_parallel
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
            max_lag_steps=cfg.token_lag_bound,
            lag_drop=cfg.preprocess.lag_drop,
            stride=num_replicas,
        )
        self.intake = Intake(ctx, self.totals.source, self.totals.order)
        self.report = BatchReport(ctx)
        self.archive = RolloutArchive(
            open_archive(cfg.archive, ctx.run_dir, ctx.job.name, ArchivedStep, share=ROLLOUTS_SHARE / num_replicas)
        )
        self.trainer = TrainerState(ctx.run_dir)
        self.trainer.start_listening()
        self.next_commit = time.monotonic()
        log.info(
            "event=ready step=%d source=%s packed=%d dropped=%d ranks=%d reference=%s",
            self.cutter.step,
            self.totals.source,
            self.totals.samples_packed,
            self.totals.dropped.total(),
            self.collation.data_parallel_size,
            self.intake.is_scoring,
        )

    def turn(self) -> None:
        """Read groups, decide which samples are trained, and publish full batches."""
        if self.cfg.stage == "sft":
            self._publish_conversations()
            return
        self.intake.read()
        if self.intake.resumed is not None and not self.totals.step:
            self.totals.resume_at(self.intake.resumed.step)
            self.cutter.resume_at(next_own_step(self.totals.step, self.ctx.job.replica_idx, self.cutter.stride))
        for sample in self.intake.next_samples():
            self._decide(sample)
        self._report_drops()

    @property
    def is_done(self) -> bool:
        """Whether all recorded groups were read (`debug.mode=preprocessor`). A whole run's groups never end."""
        return self.cfg.debug.mode is not None and self.intake.is_exhausted

    def close(self) -> None:
        self.trainer.stop()
        self.intake.close()
        self.publisher.close()
        self.progress.close()
        self.report.close()

    def _publish_conversations(self) -> None:
        """Publish the next step of a run that imitates, when the trainer is near enough."""
        step = self.cutter.step
        if step >= self.cfg.finetune.max_train_steps:
            self.ctx.stop.wait(BUSY_POLL_S)
        elif self._wait_for_trainer(step):
            self._publish(OptimizerBatch(step=step, samples=(), next_source=self.totals.source))
            self.cutter.step += self.cutter.stride

    def _decide(self, sample: Sample) -> None:
        """Decide whether a sample is trained, and publish the batch if it is full."""
        reason = self.cutter.offer(sample)
        self.archive.add(sample, reason)
        if self.totals.decided(sample, reason) or reason is None:
            self.report.decided(sample, reason, self.cutter)
        batch = self.cutter.next_batch()
        if batch is not None and self._wait_for_trainer(batch.step):
            self._publish(batch)

    def _wait_for_trainer(self, step: int) -> bool:
        """Apply back-pressure. False when asked to stop meanwhile (the batch is rebuilt after the restart)."""
        if not self._too_far_ahead(step):
            return True
        self._report_drops()
        last = step - max_ready_steps(self.cfg) - 1
        with self.ctx.status.waiting(f"training of step {last}", on="finetune_0"):
            # It always ends, because the trainer has a batch to train.
            while self._too_far_ahead(step):
                if self.ctx.stop.wait(BUSY_POLL_S):
                    return False
        return True

    def _too_far_ahead(self, step: int) -> bool:
        if self.cfg.debug.mode is not None:
            return False  # nobody trains
        return step - (self.trainer.steps_done or 0) > max_ready_steps(self.cfg)

    def _report_drops(self) -> None:
        """Write a record of the drops that are in no record yet."""
        if self.totals.pending:
            self.intake.barrier()
            self.progress.write(self.totals.to_record())

    def _publish(self, batch: OptimizerBatch) -> None:
        """Write the data, then the record of progress, then release the actor's records. Durable in the same order."""
        began = time.time_ns()
        if self.supervised is not None:
            batch = replace(batch, samples=(*batch.samples, *self.supervised.samples(batch.step)))
        rollouts = [sample for sample in batch.samples if sample.token_weights is None]
        order = self.intake.resolve_before(batch.next_source, [sample.domain for sample in rollouts])
        batches = with_order(collate(batch, self.collation), order)
        self.intake.barrier()
        self.publisher.publish(self._with_held_out(batches, batch))
        self.publisher.barrier()
        record_spans(batch, began)
        self.totals.published(batch, order)
        self.progress.write(self.totals.to_record([sample.sample_id for sample in rollouts]))
        self.archive.write(batch.step)
        if time.monotonic() >= self.next_commit:
            self._commit()
        quality = quality_of(batches, self.collation.seq_length, share_prefixes=self.collation.share_prefixes)
        values = batch_metrics(batch, quality)
        if self.supervised is not None:
            values[PreprocessorMetric.SFT_ROWS] = self.supervised.num_used
            values[PreprocessorMetric.SFT_ROWS_LEFT_OUT] = self.supervised.num_left_out
        self.report.published(batch, values, self.totals)

    def _with_held_out(self, batches: list[list[MicroBatch]], batch: OptimizerBatch) -> list[list[MicroBatch]]:
        """Add the held-out conversations if the trainer computes their loss before or after this step."""
        step = batch.step
        due = self.cfg.is_evaluated(step + 1) or (step == 0 and self.cfg.is_evaluated(0))
        if self.held_out is None or not due:
            return batches
        samples = self.held_out.samples(step)
        return with_held_out(batches, collate(replace(batch, samples=samples), self.collation))

    def _commit(self) -> None:
        """Release the groups of published batches."""
        self.progress.barrier()
        self.intake.commit(self.totals.source)
        self.next_commit = time.monotonic() + COMMIT_EVERY_S
