"""The trainer's loop: one optimizer batch in, one weight version out.

Consumes: topic `training_data` (this rank's partition), topic `evaluation`.
Produces: optimizer steps, weight updates on the servers, messages on topic `trainer`, checkpoints, metrics.
Waits for: the servers at the start (deadline `launcher.startup_timeout_s`), the micro-batches of the next step, the
previous weight update before it offers the next. Ends: after `finetune.max_train_steps`, or when asked to stop.

The push of version n runs beside the training of step n. The trainer's checkpoint is the truth: started again, the role
loads the newest whole one, pushes its weights and replays the stream from there.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoTokenizer

from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.accumulate import BatchRules, train_step
from pipelinerl.finetune.checkpoints import CheckpointReader, CheckpointWriter, Counters
from pipelinerl.finetune.engines import Engine, build_engine, choose_engine, init_ranks
from pipelinerl.finetune.export import save_hf, snapshot
from pipelinerl.finetune.feed import Feed
from pipelinerl.finetune.model import DTYPES, Policy, load_lm, verify_packing
from pipelinerl.finetune.optim import learning_rate
from pipelinerl.finetune.publish import EvaluationLease, Publisher
from pipelinerl.finetune.rl.losses import settings_at
from pipelinerl.finetune.servers import Pushes, ServerPushes
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.observability.role import RoleContext
from pipelinerl.records import MicroBatch, SamplesProcessed, TrainerMessage, TrainingDone
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.records.topics import EVALUATION, TRAINER, TRAINING_DATA
from pipelinerl.streams import SingleStreamSpec, TopicReader, open_reader, open_writer

log = logging.getLogger(__name__)

LOGGED = (
    *("loss", "reward", "grad_norm", "lr", "entropy", "ess", "lag_mean", "lag_max", "tokens"),
    *("step_s", "wait_s", "push_wait_s", "pause_ms"),
)


class TrainerTopic:
    """Topic `trainer`, written by the loop and by the thread that pushes weights."""

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
    pushes: Pushes
    metrics: MetricsLogger
    evaluations: TopicReader[Any]

    def close(self) -> None:
        self.publisher.close()
        self.evaluations.close()
        self.pushes.close()
        self.metrics.close()
        self.topic.close()


class Trainer:
    """One rank of the trainer."""

    def __init__(self, ctx: RoleContext, pushes: Callable[[RoleContext], Pushes] = ServerPushes):
        """``pushes`` makes the way to the servers; it is only called on rank 0."""
        self.ctx, self.cfg, self._make_pushes = ctx, ctx.cfg, pushes
        self.root = checkpoints.checkpoint_root(ctx.run_dir)
        if ctx.world.accelerator == "cpu":
            torch.set_num_threads(max(len(ctx.job.cores) // ctx.job.num_ranks, 1))
        self.rank, self.world_size, self.device = init_ranks(ctx.world.accelerator)
        torch.manual_seed(self.cfg.seed + self.rank)
        self.engine = self._build_engine()
        self.dtype = DTYPES[self.cfg.finetune.dtype]
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.cfg.model_path, trust_remote_code=self.cfg.trust_remote_code
        )
        self.counters = Counters(step=0, samples_processed=0, tokens_processed=0, positions={})
        self.saved_step = 0
        resumed = checkpoints.newest_valid(self.root)
        if resumed is not None:
            self._resume(resumed)
        self.feed = self._open_feed()
        self.rules = self._rules()
        self.outputs = self._open_outputs() if self.rank == 0 else None

    # --- the loop

    def run(self) -> None:
        """Train until done or stopped."""
        try:
            self._publish_initial()
            while self.counters.step < self.cfg.finetune.max_train_steps:
                if not self._advance():
                    log.info("stopped step=%d", self.counters.step)
                    return
            self._finish()
        finally:
            self.close()

    def _advance(self) -> bool:
        """One optimizer step and what follows it; False when asked to stop."""
        step = self.counters.step
        waited = time.perf_counter()
        with self.ctx.status.waiting(f"micro-batches of step {step}", on="preprocessor"):
            records = self.feed.next_step(step, self._stopping)
        if records is None:
            return False
        waited = time.perf_counter() - waited
        settings = settings_at(self.cfg.finetune.rl, step, self.cfg.finetune.max_train_steps)
        metrics = train_step(self.engine, records, settings, self.rules, learning_rate(self.cfg.finetune, step))
        self._count(records)
        metrics |= {"wait_s": waited, "push_wait_s": self._publish()}
        self._report(metrics)
        if self.counters.step % self.cfg.finetune.save_checkpoint_steps == 0:
            self.save()
        return True

    def _stopping(self) -> bool:
        """Every rank leaves alone: the launcher signals all of them."""
        return self.ctx.stop.is_set()

    def _count(self, records: list[MicroBatch]) -> None:
        self.counters = Counters(
            step=self.counters.step + 1,
            samples_processed=self.counters.samples_processed + records[0].num_samples,
            tokens_processed=self.counters.tokens_processed + records[0].num_tokens,
            positions=self.feed.positions(),
        )

    def _report(self, metrics: dict[str, float]) -> None:
        step = self.counters.step
        self.ctx.status.progress(step=step, samples=self.counters.samples_processed)
        if self.outputs is None:
            return
        stats = self.outputs.publisher.stats
        metrics |= {
            "pause_ms": stats.pause_ms_mean,
            "transfer_ms": stats.transfer_ms,
            "live_version": float(stats.version),
        }
        self.outputs.topic.write(
            SamplesProcessed(
                samples_processed=self.counters.samples_processed, step=step, metrics=metrics, timestamp=time.time()
            )
        )
        self.outputs.metrics.log(metrics | {"samples": self.counters.samples_processed}, step=step)
        log.info("step=%d %s", step, " ".join(f"{name}={metrics[name]:.4g}" for name in LOGGED))

    # --- weights

    def _publish_initial(self) -> None:
        """Every server gets the current weights before anything is trained."""
        taken = snapshot(self.engine, self.dtype)
        if self.outputs is not None:
            with self.ctx.status.waiting("inference servers to start", on="actor_llm"):
                self.outputs.pushes.wait_for_servers(self._stopping, resumed=self.counters.step > 0)
            self.outputs.publisher.offer(self.counters.step, taken)
            self._wait_live(self.counters.step)
        self.engine.barrier()

    def _publish(self) -> float:
        """Offer the new version when it is due; returns the seconds that the previous push made us wait."""
        if not is_push_due(self.counters.step, self._push_interval, self.cfg.finetune.max_train_steps):
            return 0.0
        started = time.perf_counter()
        if self.outputs is not None:
            with self.ctx.status.waiting("the previous weight update", on="actor_llm"):
                self.outputs.publisher.wait_ready()
        waited = time.perf_counter() - started
        taken = snapshot(self.engine, self.dtype)
        if self.outputs is not None:
            self.outputs.publisher.offer(self.counters.step, taken)
        return waited

    @property
    def _push_interval(self) -> int:
        conventional = self.cfg.schedule == "conventional"
        return self.cfg.steps_per_phase if conventional else self.cfg.finetune.weight_update_interval

    def _wait_live(self, version: int) -> None:
        assert self.outputs is not None
        with self.ctx.status.waiting(f"version {version} to be live", on="actor_llm"):
            while not self._stopping() and not self.outputs.publisher.wait_live(version, timeout_s=0.5):
                self.ctx.status.progress() if self.outputs.publisher.holding else None

    # --- beginning and end

    def _finish(self) -> None:
        """Save, wait until the last weights are live, say so."""
        if self.saved_step != self.counters.step:
            self.save()
        if self.outputs is not None:
            self._wait_live(self.counters.step)
            if not self._stopping():
                self.outputs.topic.write(TrainingDone(step=self.counters.step, timestamp=time.time()))
                log.info("training done step=%d samples=%d", self.counters.step, self.counters.samples_processed)
        self.engine.barrier()

    def save(self) -> None:
        """Write and publish a checkpoint of the current step. Collective."""
        started, step = time.perf_counter(), self.counters.step
        writer = CheckpointWriter(self.root, step) if self.rank == 0 else None
        self.engine.barrier()
        folder = self.root / checkpoints.unpublished_name(step)
        state = self.engine.state()
        if writer is not None:
            writer.write_state(state)
        else:
            for _ in state:
                pass
        checkpoints.save_rng(folder, self.rank, self.device)
        save_hf(self.engine, folder / "hf", self.cfg.finetune.dtype, self.dtype, self.tokenizer)
        positions = self._all_positions()
        if writer is not None:
            path = writer.publish(msgspec.structs.replace(self.counters, positions=positions))
            log.info("checkpoint published path=%s seconds=%.2f", path, time.perf_counter() - started)
            kept = checkpoints.prune(self.root, self.cfg.finetune.keep_checkpoints)
            oldest = checkpoints.read_manifest_counters(kept[-1]).positions
        else:
            oldest = None
        self.saved_step = step
        self.feed.commit(self.engine.broadcast_object(oldest))

    def _all_positions(self) -> dict[str, int]:
        """Stream positions of all ranks. Collective."""
        if self.world_size == 1:
            return self.feed.positions()
        gathered: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(gathered, self.feed.positions())
        return {key: position for positions in gathered for key, position in positions.items()}

    def _build_engine(self) -> Engine:
        finetune = self.cfg.finetune
        policy = Policy(
            load_lm(self.cfg.model_path, self.cfg, self.device),
            temperature=finetune.rl.temperature,
            chunk=finetune.head_chunk_tokens,
            fp32_head=finetune.fp32_lm_head,
            value_loss_coef=finetune.rl.value_loss_coef if finetune.rl.advantage == "value" else None,
        )
        engine = build_engine(choose_engine(self.cfg, self.world_size), policy, self.cfg, self.device)
        verify_packing(engine.policy, self.device, finetune.attn_implementation)
        return engine

    def _resume(self, reader: CheckpointReader) -> None:
        counters = reader.counters
        self.engine.load_state(reader.state, counters.step)
        if (rng := reader.rng(self.rank)) is not None:
            checkpoints.restore_rng(rng, self.device)
        self.counters, self.saved_step = counters, counters.step
        log.info("resumed path=%s step=%d samples=%d", reader.path, counters.step, counters.samples_processed)

    def _open_feed(self) -> Feed:
        readers = {}
        for instance in range(max(len(self.ctx.world.get("preprocessor")), 1)):
            spec = SingleStreamSpec(self.ctx.run_dir, TRAINING_DATA, instance, self.rank)
            key = f"{instance}/{self.rank}"
            readers[key] = open_reader(
                spec, MicroBatch, name=f"finetune_{self.rank}", start=self.counters.positions.get(key, 0)
            )
        return Feed(readers, self.counters.step)

    def _rules(self) -> BatchRules:
        config = self.engine.policy.lm.config.get_text_config()
        return BatchRules(
            vocab_size=config.vocab_size,
            max_lag_steps=self.cfg.max_lag_steps,
            allow_rows="flash" not in config._attn_implementation,
            tokens_per_attention_unit=6 * config.hidden_size,
        )

    def _open_outputs(self) -> Outputs:
        topic = TrainerTopic(self.ctx.run_dir)
        evaluations = open_reader(
            SingleStreamSpec(self.ctx.run_dir, EVALUATION), EvaluationMessage, name="finetune", start=0
        )
        pushes = self._make_pushes(self.ctx)
        lease = EvaluationLease(lambda: [message for _, message in evaluations.read_all()])
        publisher = Publisher(pushes.push, topic.write, lease, pushes.attend)
        return Outputs(topic, publisher, pushes, MetricsLogger(self.cfg, self.ctx.run_dir, "finetune"), evaluations)

    def close(self) -> None:
        self.feed.close()
        if self.outputs is not None:
            self.outputs.close()
        self.engine.close()


def is_push_due(step: int, interval: int, max_train_steps: int) -> bool:
    """Whether the weights after ``step`` optimizer steps go out: every ``interval`` steps and at the end."""
    return step % interval == 0 or step == max_train_steps


def run(ctx: RoleContext) -> None:
    """The role."""
    transformers.utils.logging.disable_progress_bar()
    Trainer(ctx).run()
