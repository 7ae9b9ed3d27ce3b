"""The trainer's loop: one optimizer batch in, one weight version out, pushed while the next step trains.

Consumes: topic `training_data` (this rank's partition), topic `evaluation`.
Produces: optimizer steps, weight updates on the servers, messages on topic `trainer`, checkpoints, metrics.
Waits for: the servers at the start (deadline `launcher.startup_timeout_s`), the next micro-batches, the previous weight
update. Ends: when asked to stop, and without the rest of the run after the last recorded step.
"""

import gc
import logging
import os
import time
import uuid
from collections.abc import Callable
from enum import IntEnum
from functools import partial

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.paths import weight_store
from pipelinerl.config.servers import probe_tolerance, sends_adapter, takes_versions
from pipelinerl.finetune.accumulate import held_out_loss, train_step
from pipelinerl.finetune.archiving import open_scores
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.build import make_engine, make_rules
from pipelinerl.finetune.engines import Engine, read_ranks
from pipelinerl.finetune.learning_rate import learning_rate
from pipelinerl.finetune.model import DTYPES, PolicyOutput
from pipelinerl.finetune.outputs import Outputs
from pipelinerl.finetune.profiling import open_profile
from pipelinerl.finetune.progress import report_progress
from pipelinerl.finetune.proximal import ProximalPolicy
from pipelinerl.finetune.resume import in_present_streams
from pipelinerl.finetune.rl.objective import settings_at
from pipelinerl.finetune.saving import Saver, SaveRules, SaveSchedule
from pipelinerl.finetune.tracing import StepSpans
from pipelinerl.finetune.updates import Announce, Sender, StripeHolder, WeightUpdates, last_needed
from pipelinerl.finetune.without_servers import connect_nobody
from pipelinerl.membership.role import RoleContext
from pipelinerl.membership.watch import MembershipWatch
from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.records import MicroBatch
from pipelinerl.records.topics import TRAINING_DATA
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.weights.base_files import base_digest
from pipelinerl.weights.protocol import WeightInfo
from pipelinerl.world import Job
from pipelinerl.world.placement import SERVER_KINDS

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Wait for data after which the ranks agree again whether to stop."""
DEFERRED_POLL_S = 0.02
"""The same while a version waits to be sent, which every delay makes older."""


class Vote(IntEnum):
    """What a rank could do. The ranks do the lowest of their votes."""

    STOP = 0
    WAIT = 1
    TRAIN = 2


class Trainer:
    """One rank of the trainer. Connects the feed, the engine, the weight updates, the saves and the outputs."""

    def __init__(self, ctx: RoleContext, connect: "Connect"):
        """``connect`` as `connect_weights`."""
        self.ctx, self.cfg = ctx, ctx.cfg
        if ctx.world.accelerator == "cpu":
            torch.set_num_threads(max(len(ctx.job.cores) // ctx.job.num_ranks, 1))
        rank, world_size, device = read_ranks(ctx.world.accelerator)
        torch.manual_seed(self.cfg.seed + rank)
        self.engine = make_engine(self.cfg, device, world_size)
        report_progress(self.engine.policy, ctx.status.progress, compiled=self.cfg.finetune.compile)
        self.proximal = ProximalPolicy(self.cfg.proximal_steps, self.cfg.finetune.max_train_steps)
        saver = make_saver(ctx, self.engine, self.sync, self.proximal.state)
        self.counters = in_present_streams(saver.resume(), ctx.run_dir)
        if (left_of_block := saver.read_proximal(self.counters)) is not None:
            self.proximal.restore(left_of_block, device)
        self.feed = open_feed(ctx, rank, self.counters.positions)
        self.saves = SaveSchedule(saver, self.engine, self.cfg.finetune, ctx.status, self.feed.commit)
        self.rules = make_rules(self.engine, self.cfg)
        self.scores = open_scores(ctx, rank, world_size)
        connect_rank = partial(connect, ctx, self.engine)
        self.outputs = Outputs(ctx, connect_rank, self.counters) if rank == 0 else None
        self.origin = self.outputs.origin if self.outputs else connect_rank(None)[0]
        self.profile = open_profile(ctx, rank)
        sender, lease = (self.outputs.sender, self.outputs.lease) if self.outputs else (None, None)
        self.updates = WeightUpdates(
            self.engine, self.cfg, self.origin, sender, lease, ctx.status, ctx.stop.is_set, ctx.run_dir
        )

    def run(self, *, stay: bool = False) -> None:
        """Train until done or stopped.

        ``stay``: after the last step, stay until stopped, so that a server that restarts can get the last version.
        """
        self.ctx.status.progress()  # ready: the first data may take hours to sample
        try:
            self.saves.export_again(self.counters)
            placed = [job for kind in SERVER_KINDS for job in self.ctx.world.get(kind)]
            num_servers = sum(takes_versions(self.cfg, job.kind, job.replica_idx) for job in placed)
            self.updates.start(self.counters.step, num_servers, resumed=self.counters.step > 0)
            gc.collect()
            gc.freeze()  # a full collection of model, optimizer and their modules stops training and finds nothing
            while self.counters.step < self.cfg.finetune.max_train_steps:
                if not self.advance():
                    self.saves.at_stop(self.counters)
                    return
            self.finish()
            if stay:
                with self.ctx.status.waiting("the last evaluation", on="actor"):
                    self.ctx.stop.wait()
        finally:
            gc.unfreeze()
            self.close()

    def advance(self) -> bool:
        """Train one optimizer step, then push, report and save as due. False when asked to stop."""
        started, step = time.perf_counter(), self.counters.step
        spans = StepSpans(step)
        with self.ctx.status.waiting(f"micro-batches of step {step}", on="preprocessor"):
            records = self._await_records(step)
        if records is None:
            return False
        spans.has_data()
        if self.profile is not None:
            self.profile.before(step)
        waited = time.perf_counter() - started + self.updates.idle_s
        held_out = [record for record in records if record.is_held_out]
        records = [record for record in records if not record.is_held_out]
        if held_out and step == 0 and self.cfg.is_evaluated(0):
            loss = held_out_loss(self.engine, held_out, self.rules)
            if self.outputs is not None:
                self.outputs.report_start({TrainerMetric.SFT_TEST_LOSS: loss})
        settings = settings_at(self.cfg, step)
        proximal = self.proximal.of_step(step, records, self.feed, self.engine, self.rules)
        rate = learning_rate(self.cfg.finetune, step)

        def observe(record: MicroBatch, output: PolicyOutput, altered_K: Tensor) -> None:
            self.scores.add(record, output, altered_K)
            spans.micro_batch(record)

        metrics = train_step(self.engine, records, settings, self.rules, rate, proximal, observe)
        spans.end()
        self.scores.write(step)
        left_of = self.proximal.made_at if self.proximal.is_inside_block else None
        self.counters = self.counters.after(
            records[0], self.feed.resume_offsets(), self.feed.instance_of(step), left_of
        )
        push_wait_s = self.updates.after_step(step + 1, self._has_data)
        if self.profile is not None:
            self.profile.after(step)
        metrics |= {TrainerMetric.WAIT_S: waited, TrainerMetric.PUSH_WAIT_S: push_wait_s}
        if held_out and self.cfg.is_evaluated(step + 1):
            metrics[TrainerMetric.SFT_TEST_LOSS] = held_out_loss(self.engine, held_out, self.rules)
        self.ctx.status.progress(step=step + 1, samples=self.counters.samples_processed, saved=False)
        if self.outputs is not None:
            self.outputs.report(self.counters, metrics)
        self.saves.after_step(self.counters)
        return True

    def finish(self) -> None:
        """Save, wait until the last weights are live, and report that training is done."""
        self.saves.at_end(self.counters)
        live = self.updates.finish(self.counters.step)
        self.saves.wait(self.counters.step)
        if live and self.outputs is not None:
            self.outputs.training_done(self.counters)

    def close(self) -> None:
        if self.profile is not None:
            self.profile.close()
        self.saves.close()
        self.feed.close()
        if self.outputs is not None:
            self.outputs.close()
        self.origin.close()
        self.engine.close()

    def _await_records(self, step: int) -> list[MicroBatch] | None:
        """Wait for the micro-batches of ``step``, or at a phase's start of the whole phase.

        None when asked to stop, or at the end of recorded data. Sends a deferred update as soon as that is allowed.
        """
        while True:
            poll_s = DEFERRED_POLL_S if self.updates.deferred else POLL_S
            records = self.feed.next_step(step, poll_s, self._last_needed(step))
            is_over = records is None and self.cfg.debug.mode is not None  # recorded data, all of it read
            # The ranks agree whether to train, stop or send weights.
            agreed = self.engine.lowest(
                Vote.STOP if self.ctx.stop.is_set() or is_over else Vote.WAIT if records is None else Vote.TRAIN
            )
            if agreed == Vote.TRAIN:
                return records
            if records is not None:
                self.feed.put_back()
            if agreed == Vote.STOP:
                return None
            self.updates.retry(step)

    def _has_data(self) -> bool:
        """Whether this rank could train its next step now."""
        step = self.counters.step
        return step < self.cfg.finetune.max_train_steps and self.feed.has_steps(step, 0.0, self._last_needed(step))

    def sync(self) -> None:
        """Make durable what a checkpoint builds on: the records that were read, and the metrics of its steps."""
        self.feed.sync()
        if self.outputs:
            self.outputs.sync()

    def _last_needed(self, step: int) -> int:
        return max(last_needed(step, self.cfg), self.proximal.last_needed(step))


def make_saver(
    ctx: RoleContext, engine: Engine, sync_streams: Callable[[], None], proximal_state: Callable[[], bytes | None]
) -> Saver:
    """Make the saver of this run's checkpoints and exports. ``sync_streams`` and ``proximal_state`` as in ``Saver``."""
    cfg = ctx.cfg
    rules = SaveRules(
        run_dir=ctx.run_dir,
        dtype=DTYPES[cfg.finetune.dtype],
        keep=cfg.finetune.keep_checkpoints,
        keep_exports=cfg.finetune.keep_exports,
    )
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_path, trust_remote_code=cfg.trust_remote_code)
    return Saver(engine, rules, tokenizer, sync_streams, proximal_state)


def open_feed(ctx: RoleContext, rank: int, positions: dict[str, int]) -> BatchReader:
    """Open this rank's partition of every preprocessor's `training_data` at ``positions`` (key → next offset)."""
    readers = []
    for instance in range(max(len(ctx.world.get("preprocessor")), 1)):
        spec = SingleStreamSpec(ctx.run_dir, TRAINING_DATA, instance, rank)
        key = f"{instance}/{rank}"
        readers.append((key, open_reader(spec, MicroBatch, name=f"finetune_{rank}", start=positions.get(key, 0))))
    return BatchReader(readers)


Connect = Callable[[RoleContext, Engine, Announce | None], tuple[StripeHolder, Sender | None]]


def connect_weights(ctx: RoleContext, engine: Engine, announce: Announce | None) -> tuple[StripeHolder, Sender | None]:
    """This rank's end of weight updates, and on rank 0 the sender to the policy's servers. Collective.

    Args:
        announce: writes the sender's messages to topic `trainer`. None on all ranks but 0.
    """
    from pipelinerl.weights.publish.origin import Origin, SenderSettings
    from pipelinerl.weights.publish.sender import WeightSender

    weights = ctx.cfg.weights
    settings = SenderSettings(
        secret=os.environ[SECRET_VARIABLE],
        transport=ctx.world.transfer_backend(weights.backend),
        weights=weights,
        patience_s=ctx.cfg.launcher.hang_timeout_s / 2,  # before the launcher blames a role that waits
        host=ctx.job.hostname,
        port=ctx.world.weight_port if engine.rank == 0 else 0,
        device="cuda" if ctx.world.accelerator == "cuda" else "cpu",
        probe_tolerance=probe_tolerance(ctx.cfg) if weights.probe else None,
        base=base_digest(ctx.cfg.model_path) if sends_adapter(ctx.cfg) else None,
        store=weight_store(weights.store, ctx.run_dir) if weights.backend == "store" else None,
    )
    name = engine.broadcast_object(uuid.uuid4().hex)
    origin = Origin(settings, sender=name, rank=engine.rank, ranks=engine.world_size)
    addresses, view = engine.gather_objects(origin.address), ctx.server_view
    if announce is None:
        return origin, None

    def servers() -> list[Job]:
        jobs = [server.job for kind in SERVER_KINDS for server in view.servers(kind).values()]
        return [job for job in jobs if takes_versions(ctx.cfg, job.kind, job.replica_idx)]

    reports = None if ctx.membership is None else partial(server_reports, ctx.membership.watch)
    return origin, WeightSender(servers, settings, announce, origin, addresses[1:], reports)


def server_reports(watch: MembershipWatch) -> dict[str, WeightInfo]:
    """Weights of each server by its name, from the leases."""
    return {
        name: WeightInfo(weight_version=lease.version, serving=lease.fetched[0], reading=lease.fetched[1])
        for name, lease in watch.observed.alive().items()
        if lease.version
    }


def run(ctx: RoleContext) -> None:
    """Run the trainer role on this rank until it is asked to stop."""
    transformers.utils.logging.disable_progress_bar()
    standalone = ctx.cfg.debug.mode is not None or ctx.cfg.stage == "sft"
    Trainer(ctx, connect_nobody if standalone else connect_weights).run(stay=not standalone)
