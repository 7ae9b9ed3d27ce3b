"""The trainer's loop: one optimizer batch in, one weight version out.

Consumes: topic `training_data` (this rank's partition), topic `evaluation`.
Produces: optimizer steps, weight updates on the servers, messages on topic `trainer`, checkpoints, metrics.
Waits for: the servers at the start (deadline `launcher.startup_timeout_s`), the micro-batches of the next step, the
previous weight update before it begins another. Ends: when asked to stop, which the launcher does once the actor has
made the last evaluation.

The push of a version runs beside the training of the next step. The trainer's checkpoint is the truth: started again,
the role loads the newest whole one, pushes its weights and replays the stream from there.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from pipelinerl.config.engine import engine_of
from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.accumulate import BatchRules, train_step
from pipelinerl.finetune.architecture import examine
from pipelinerl.finetune.archiving import open_scores
from pipelinerl.finetune.attention import PACKED
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.checkpoints import Counters
from pipelinerl.finetune.engines import Engine, build_engine, join_ranks, read_ranks
from pipelinerl.finetune.loading import load_model, stream_weights
from pipelinerl.finetune.model import DTYPES, Policy, isolation_error
from pipelinerl.finetune.optim import learning_rate
from pipelinerl.finetune.proximal import ProximalPolicy
from pipelinerl.finetune.publish import EvaluationLease, Publisher, Sender
from pipelinerl.finetune.rl.diagnostics import clip_warning
from pipelinerl.finetune.rl.objective import settings_at
from pipelinerl.finetune.saving import Saver, SaveRules
from pipelinerl.finetune.sequence import make_sequence_group
from pipelinerl.finetune.updates import WeightUpdates, last_needed
from pipelinerl.observability.metrics import MetricsLogger, drop_points_after
from pipelinerl.observability.role import RoleContext
from pipelinerl.records import MicroBatch, SamplesProcessed, TrainerMessage, TrainingDone, TrainingResumed
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.records.topics import EVALUATION, TRAINER, TRAINING_DATA
from pipelinerl.streams import SingleStreamSpec, TopicReader, open_reader, open_writer

log = logging.getLogger(__name__)

POLL_S = 0.2
MAX_ISOLATION_ERROR = 1e-4
STOP, WAIT, TRAIN = 0, 1, 2
LOGGED = (
    *("loss", "reward", "grad_norm", "lr", "entropy", "ess", "lag_mean", "lag_max", "tokens"),
    *("step_s", "wait_s", "push_wait_s", "pause_ms"),
)


class TrainerTopic:
    """Topic `trainer`, written by the loop and by the thread that announces weights."""

    def __init__(self, run_dir: Any):
        self._writer = open_writer(SingleStreamSpec(run_dir, TRAINER), TrainerMessage)
        self._lock = threading.Lock()

    def write(self, message: Any) -> None:
        with self._lock:
            self._writer.write(message)

    def close(self) -> None:
        with self._lock:
            self._writer.close()


@dataclass
class Outputs:
    """What only rank 0 has: everything that leaves the trainer."""

    topic: TrainerTopic
    publisher: Publisher
    metrics: MetricsLogger
    evaluations: TopicReader[Any]
    warned: bool = False

    def warn_once(self, text: str | None) -> None:
        """Log the first warning of the run."""
        if text is not None and not self.warned:
            self.warned = True
            log.warning(text)

    def close(self) -> None:
        self.publisher.close()
        self.evaluations.close()
        self.metrics.close()
        self.topic.close()


class Trainer:
    """One rank of the trainer."""

    def __init__(self, ctx: RoleContext, make_sender: Callable[[RoleContext], Sender]):
        """``make_sender`` makes the way to the servers; it is called on rank 0 only."""
        self.ctx, self.cfg = ctx, ctx.cfg
        if ctx.world.accelerator == "cpu":
            torch.set_num_threads(max(len(ctx.job.cores) // ctx.job.num_ranks, 1))
        self.rank, world_size, device = read_ranks(ctx.world.accelerator)
        torch.manual_seed(self.cfg.seed + self.rank)
        self.engine = make_engine(self.cfg, device, world_size)
        self.saver = self._make_saver()
        self.counters = self.saver.resume() or Counters()
        self.feed = self._open_feed()
        self.rules = make_rules(self.engine.policy, self.cfg)
        self.proximal = ProximalPolicy(self.cfg.proximal_steps, self.cfg.finetune.max_train_steps)
        self.scores = open_scores(ctx, self.rank, world_size)
        self.outputs = self._open_outputs(make_sender(ctx)) if self.rank == 0 else None
        publisher = self.outputs.publisher if self.outputs else None
        dtype = DTYPES[self.cfg.finetune.dtype]
        self.updates = WeightUpdates(self.engine, self.cfg, dtype, publisher, ctx.status, ctx.stop.is_set, ctx.run_dir)

    def run(self, *, stay: bool = False) -> None:
        """Train until done or stopped.

        Args:
            stay: when done, look after the servers until stopped: one that dies during the last evaluation comes back
                with the weights on disk, and only the trainer can give it the last ones.
        """
        try:
            self._export_again()
            self.updates.start(self.counters.step, len(self.ctx.world.get("actor_llm")), resumed=self.counters.step > 0)
            while self.counters.step < self.cfg.finetune.max_train_steps:
                if not self.advance():
                    self._save_at_stop()
                    return
            self.finish()
            if stay:
                with self.ctx.status.waiting("the last evaluation", on="actor"):
                    self.ctx.stop.wait()
        finally:
            self.close()

    def advance(self) -> bool:
        """One optimizer step and what follows it; False when asked to stop."""
        started, step = time.perf_counter(), self.counters.step
        with self.ctx.status.waiting(f"micro-batches of step {step}", on="preprocessor"):
            records = self._await_records(step)
        if records is None:
            return False
        waited = time.perf_counter() - started
        settings = settings_at(self.cfg, step)
        proximal = self.proximal.of_step(step, records, self.feed, self.engine, self.rules)
        rate = learning_rate(self.cfg.finetune, step)
        metrics = train_step(self.engine, records, settings, self.rules, rate, proximal, self.scores.add)
        self.scores.write(step)
        self.counters = self.counters.after(records[0].num_samples, records[0].num_tokens, self.feed.positions())
        metrics |= {"wait_s": waited, "push_wait_s": self.updates.after_step(step + 1)}
        self._report(metrics)
        if self._is_export_step():
            self.save(export=True)
        elif self._is_rolling_due():
            self.save(export=False)
        else:
            self._release(self.saver.poll())
        return True

    def _await_records(self, step: int) -> list[MicroBatch] | None:
        """The micro-batches of ``step``, at a phase's start when all of the phase are there; None when asked to stop.

        Meanwhile a deferred update goes out when it may. The ranks go round together, so that they agree on training,
        on stopping, and on sending weights.
        """
        while True:
            last = max(last_needed(step, self.cfg), self.proximal.last_needed(step))
            records = self.feed.next_step(step, POLL_S, last)
            agreed = self._lowest(STOP if self.ctx.stop.is_set() else WAIT if records is None else TRAIN)
            if agreed == TRAIN:
                return records
            if records is not None:
                self.feed.put_back()
            if agreed == STOP:
                return None
            self.updates.retry(step)

    def _lowest(self, mine: int) -> int:
        """The smallest of all ranks' values. Collective."""
        if self.engine.world_size == 1:
            return mine
        box = torch.tensor(mine, device=self.engine.device)
        torch.distributed.all_reduce(box, op=torch.distributed.ReduceOp.MIN)
        return int(box.item())

    def _report(self, metrics: dict[str, float]) -> None:
        step = self.counters.step
        self.ctx.status.progress(step=step, samples=self.counters.samples_processed, saved=False)
        if self.outputs is None:
            return
        stats = self.outputs.publisher.stats
        metrics |= {"pause_ms": stats.pause_ms, "transfer_ms": stats.transfer_ms, "live_version": float(stats.version)}
        self.outputs.topic.write(
            SamplesProcessed(
                samples_processed=self.counters.samples_processed, step=step, metrics=metrics, timestamp=time.time()
            )
        )
        self.outputs.metrics.log(metrics | {"samples": self.counters.samples_processed}, step=step)
        self.outputs.warn_once(clip_warning(metrics))
        log.info("step=%d %s", step, " ".join(f"{name}={metrics[name]:.4g}" for name in LOGGED))

    def save(self, *, export: bool) -> None:
        """Begin a checkpoint of the current step, and the model's export; training goes on meanwhile. Collective."""
        self._wait_saved()
        self.saver.start(self.counters, export=export)

    def _is_export_step(self) -> bool:
        return self.counters.step % self.cfg.finetune.save_checkpoint_steps == 0

    def _is_rolling_due(self) -> bool:
        """Whether the newest checkpoint is so old that all ranks want another. Collective."""
        minutes = self.cfg.finetune.save_checkpoint_minutes
        return minutes is not None and self._lowest(int(self.saver.is_idle_since(60 * minutes))) == 1

    def _wait_saved(self) -> None:
        with self.ctx.status.waiting("the checkpoint to be written"):
            self._release(self.saver.finish())

    def _release(self, needed: dict[str, int] | None) -> None:
        """Let go of the stream below the oldest checkpoint that is kept."""
        if needed is not None:
            self.feed.commit(needed)
            self.ctx.status.progress(saved=self.saver.step == self.counters.step)

    def _export_again(self) -> None:
        """Export the model of the step that is resumed from, if it was lost between its checkpoint and its export."""
        if self.counters.step and self._is_export_step() and not self.saver.has_export(self.counters.step):
            self.save(export=True)

    def _save_at_stop(self) -> None:
        """Asked to stop: every finished step is saved. Collective."""
        if self.saver.step != self.counters.step:
            self.save(export=False)
        self._wait_saved()
        log.info("stopped step=%d saved=%d", self.counters.step, self.saver.step)

    def finish(self) -> None:
        """Save, wait until the last weights are live, say so."""
        step = self.counters.step
        self._wait_saved()
        if self.saver.step != step or not self.saver.has_export(step):
            self.save(export=True)
        live = self.updates.finish(step)
        self._wait_saved()
        if live and self.outputs is not None:
            self.outputs.topic.write(TrainingDone(step=step, timestamp=time.time()))
            log.info("training done step=%d samples=%d", step, self.counters.samples_processed)

    def close(self) -> None:
        self.saver.close()
        self.feed.close()
        if self.outputs is not None:
            self.outputs.close()
        self.engine.close()

    def _make_saver(self) -> Saver:
        cfg = self.cfg
        rules = SaveRules(
            run_dir=self.ctx.run_dir,
            dtype=DTYPES[cfg.finetune.dtype],
            keep=cfg.finetune.keep_checkpoints,
            keep_exports=cfg.finetune.keep_exports,
        )
        tokenizer = AutoTokenizer.from_pretrained(cfg.model_path, trust_remote_code=cfg.trust_remote_code)
        return Saver(self.engine, rules, tokenizer, lambda: self.feed.sync())

    def _open_feed(self) -> BatchReader:
        readers = []
        for instance in range(max(len(self.ctx.world.get("preprocessor")), 1)):
            spec = SingleStreamSpec(self.ctx.run_dir, TRAINING_DATA, instance, self.rank)
            key = f"{instance}/{self.rank}"
            start = self.counters.positions.get(key, 0)
            readers.append((key, open_reader(spec, MicroBatch, name=f"finetune_{self.rank}", start=start)))
        return BatchReader(readers)

    def _tell_resumed(self, topic: TrainerTopic) -> None:
        """Say from where a run goes on; the steps that come a second time leave its metrics."""
        step = self.counters.step
        repeated = drop_points_after(self.ctx.run_dir, "finetune", step)
        if step or repeated:
            samples = self.counters.samples_processed
            topic.write(TrainingResumed(step=step, repeated=repeated, samples_processed=samples, timestamp=time.time()))
            log.info("resuming from step %d (%d repeated)", step, repeated)

    def _open_outputs(self, sender: Sender) -> Outputs:
        topic = TrainerTopic(self.ctx.run_dir)
        self._tell_resumed(topic)
        spec = SingleStreamSpec(self.ctx.run_dir, EVALUATION)
        evaluations = open_reader(spec, EvaluationMessage, name=None, over_damage=True)
        lease = EvaluationLease(lambda: [message for _, message in evaluations.read_all()])
        metrics = MetricsLogger(self.cfg, self.ctx.run_dir, "finetune")
        return Outputs(topic, Publisher(sender, topic.write, lease), metrics, evaluations)


def make_engine(cfg: Config, device: torch.device, world_size: int) -> Engine:
    """The policy at `model_path` in the configured engine, its attention verified."""
    engine = load_engine(cfg, device, world_size)
    if cfg.finetune.seq_packing:
        verify_isolation(engine, engine.policy.lm.config.get_text_config()._attn_implementation)
    return engine


def load_engine(cfg: Config, device: torch.device, world_size: int) -> Engine:
    """The policy at `model_path` in the configured engine."""
    finetune = cfg.finetune
    name = engine_of(cfg, world_size)
    if world_size % finetune.seq_parallel:
        raise ConfigError(
            f"finetune.seq_parallel is {finetune.seq_parallel}: trainer ranks, {world_size}, must be its multiple"
        )
    join_ranks(name, world_size, device, max(cfg.launcher.startup_timeout_s, cfg.launcher.hang_timeout_s))
    found = examine(
        cfg.model_path,
        attention=finetune.attn_implementation,
        packing=finetune.seq_packing,
        seq_parallel=finetune.seq_parallel,
        trust_remote_code=cfg.trust_remote_code,
    )
    lm, files = load_model(cfg, found.attention)
    policy = Policy(
        lm,
        temperature=finetune.rl.temperature,
        chunk=finetune.head_chunk_tokens,
        fp32_head=finetune.fp32_lm_head,
        value_loss_coef=finetune.rl.value_loss_coef if finetune.rl.advantage == "value" else None,
        lora_scaling=finetune.lora.alpha / finetune.lora.r,
        sequence=make_sequence_group(finetune.seq_parallel),
        logit_map=found.logit_map,
    )
    engine = build_engine(name, policy, cfg, device)
    if files is not None:
        stream_weights(engine, files)
    log.info("engine=%s ranks=%d", name, world_size)
    return engine


def verify_isolation(engine: Engine, attention: str) -> None:
    """Refuse kernels of this device that let packed documents see each other. Collective."""
    vocab_size = engine.policy.lm.config.get_text_config().vocab_size
    error = isolation_error(engine.evaluate, vocab_size, engine.device)
    if not error <= MAX_ISOLATION_ERROR:
        raise ConfigError(
            f"finetune.attn_implementation: packed documents see each other in {attention!r} on this device (states "
            f"move by {error:.2g} of their size, {MAX_ISOLATION_ERROR} is allowed); set it to sdpa, or "
            "finetune.seq_packing=false"
        )
    log.info("packed documents are isolated attention=%s error=%.2g", attention, error)


def make_rules(policy: Policy, cfg: Config) -> BatchRules:
    """How micro-batches are checked and laid out for this policy."""
    config = policy.lm.config.get_text_config()
    attention = config._attn_implementation
    cuda = next(policy.parameters()).is_cuda
    per_document = "flash" in attention or (attention == PACKED and cuda)
    return BatchRules(
        vocab_size=config.vocab_size,
        max_lag_steps=cfg.max_lag_steps,
        layout="rows" if not cfg.finetune.seq_packing else "packed" if per_document else "cheaper",
        dense_mask=attention != PACKED,
        tokens_per_attention_unit=6 * config.hidden_size,
        sequence=policy.sequence,
    )


def make_weight_sender(ctx: RoleContext) -> Sender:
    """The sender of this run to the policy's servers."""
    from pipelinerl.weights.sender import WeightSender

    weights = ctx.cfg.weights
    return WeightSender(
        ctx.world.get("actor_llm"),
        backend=ctx.world.transfer_backend(weights.backend),
        bucket_mb=weights.bucket_mb,
        timeout_s=weights.timeout_s,
        secret=os.environ[SECRET_VARIABLE],
        host=ctx.world.master_addr,
        port_base=ctx.world.weight_port,
        device="cuda" if ctx.world.accelerator == "cuda" else "cpu",
        delta=weights.delta,
        probe_tolerance=weights.probe_tolerance if weights.probe else None,
    )


def run(ctx: RoleContext) -> None:
    """The role."""
    transformers.utils.logging.disable_progress_bar()
    Trainer(ctx, make_weight_sender).run(stay=True)
