"""The trainer's outputs on rank 0, except checkpoints: messages, weights, metrics and a log line per step."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.finetune.checkpoints import Counters
from pipelinerl.finetune.diagnostics import clip_warning
from pipelinerl.finetune.resume import resumed_message
from pipelinerl.finetune.updates import Announce, EvaluationLease, Sender, StripeHolder
from pipelinerl.membership.role import RoleContext
from pipelinerl.observability.catalogue import MetricName, TrainerMetric, as_texts
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.records import SamplesProcessed, TrainerMessage, TrainingDone
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.records.topics import EVALUATION, TRAINER
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer

log = logging.getLogger(__name__)

LOGGED = (
    *(
        TrainerMetric.LOSS,
        TrainerMetric.SFT_LOSS,
        TrainerMetric.SFT_TEST_LOSS,
        TrainerMetric.REWARD,
        TrainerMetric.GRAD_NORM,
        TrainerMetric.LR,
        TrainerMetric.ENTROPY,
        TrainerMetric.ESS,
        TrainerMetric.LAG_MEAN,
        TrainerMetric.LAG_MAX,
        TrainerMetric.TOKENS,
    ),
    *(TrainerMetric.STEP_S, TrainerMetric.WAIT_S, TrainerMetric.PUSH_WAIT_S, TrainerMetric.PAUSE_MS),
)


class TrainerTopic:
    """Writes topic `trainer`. The training loop and the thread that announces weights may share it."""

    def __init__(self, run_dir: Path):
        self._writer = open_writer(SingleStreamSpec(run_dir, TRAINER), TrainerMessage)
        self._lock = threading.Lock()

    def write(self, message: Any) -> None:
        with self._lock:
            self._writer.write(message)

    def close(self) -> None:
        with self._lock:
            self._writer.close()


class Outputs:
    """The outputs of a run that starts or resumes at ``counters``."""

    def __init__(
        self, ctx: RoleContext, connect: Callable[[Announce], tuple[StripeHolder, Sender | None]], counters: Counters
    ):
        """Open topics and metrics, and connect the sender.

        Args:
            connect: makes rank 0's end of weight updates and the sender, which calls its argument to announce versions.
            counters: steps and samples that the run has behind it.
        """
        self._topic = TrainerTopic(ctx.run_dir)
        if (message := resumed_message(ctx.run_dir, counters)) is not None:
            self._topic.write(message)
        spec = SingleStreamSpec(ctx.run_dir, EVALUATION)
        self._evaluations = open_reader(spec, EvaluationMessage, name=None, over_damage=True)
        self.lease = EvaluationLease(lambda: [message for _, message in self._evaluations.read_all()])
        self._metrics = MetricsLogger(ctx.cfg, ctx.run_dir, "finetune", once_per_step=True)
        self._warned = False
        self.origin, sender = connect(self._topic.write)
        assert sender is not None, "rank 0 has the sender"
        self.sender = sender

    def report(self, counters: Counters, metrics: dict[MetricName, float]) -> None:
        """Publish a finished step as a message, metrics and a log line. ``metrics`` gets the sender's statistics."""
        stats = self.sender.stats
        metrics |= {
            TrainerMetric.PAUSE_MS: stats.pause_ms,
            TrainerMetric.TRANSFER_MS: stats.transfer_ms,
            **{TrainerMetric.NCCL_GROUPS_FAILED.of(interface=name): n for name, n in stats.failed_groups.items()},
        }
        if stats.version >= 0:  # some server has had weights
            metrics[TrainerMetric.LIVE_VERSION] = float(stats.version)
        if stats.noise is not None and TrainerMetric.TEACHER_GAP in metrics:
            metrics[TrainerMetric.TEACHER_NOISE] = stats.noise
        samples, step = counters.samples_processed, counters.step
        self._topic.write(
            SamplesProcessed(samples_processed=samples, step=step, metrics=as_texts(metrics), timestamp=time.time())
        )
        self._metrics.log(metrics | {TrainerMetric.SAMPLES: samples}, step=step)
        self._warn_once(clip_warning(metrics))
        log.info(
            "event=step step=%d %s", step, " ".join(f"{name}={metrics[name]:.4g}" for name in LOGGED if name in metrics)
        )

    def report_start(self, metrics: dict[MetricName, float]) -> None:
        """Publish what is known of the first weights, before a step is trained."""
        self._metrics.log(metrics, step=0)
        log.info("event=start %s", " ".join(f"{name}={value:.4g}" for name, value in metrics.items()))

    def sync(self) -> None:
        """Wait until the metrics of every reported step are on disk. Safe to call from any thread."""
        self._metrics.sync()

    def training_done(self, counters: Counters) -> None:
        """Announce that the last step is saved and its weights are live."""
        self._topic.write(TrainingDone(step=counters.step, timestamp=time.time()))
        log.info("event=training_done step=%d samples=%d", counters.step, counters.samples_processed)

    def close(self) -> None:
        self.sender.close()
        self._evaluations.close()
        self._metrics.close()
        self._topic.close()

    def _warn_once(self, text: str | None) -> None:
        """Log ``text`` if it is the first warning of the run."""
        if text is not None and not self._warned:
            self._warned = True
            log.warning(text)
