"""Reports the preprocessor's work to people: metrics, a log line per batch, the status. It makes no decisions."""

import logging
import time

from pipelinerl.observability.catalogue import MetricName, PreprocessorMetric
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.observability.role import RoleContext
from pipelinerl.preprocess.batching import BatchCutter, OptimizerBatch
from pipelinerl.preprocess.lag import LengthDeciles
from pipelinerl.preprocess.metrics import Survivorship, survivorship_line
from pipelinerl.preprocess.progress import Totals
from pipelinerl.preprocess.samples import LAG, Sample

log = logging.getLogger(__name__)


class BatchReport:
    """Reports the fates of samples and the batches of one replica."""

    def __init__(self, ctx: RoleContext):
        self._status, self._max_lag_steps = ctx.status, ctx.cfg.max_lag_steps
        name = ctx.job.kind if ctx.job.replica_idx == 0 else ctx.job.name
        self._metrics = MetricsLogger(ctx.cfg, ctx.run_dir, name)
        self._survivorship = Survivorship()
        self._deciles = LengthDeciles()
        self._last_publish = time.monotonic()

    def decided(self, sample: Sample, reason: str | None, cutter: BatchCutter) -> None:
        """Record a sample's fate. Call it right after ``cutter`` decided it."""
        self._survivorship.add(sample, reason)
        if reason in (None, LAG):
            lag = cutter.step - sample.oldest_version
            self._deciles.add(sample.num_trained, lag, cutter.lost_share(sample, reason))

    def published(self, batch: OptimizerBatch, values: dict[MetricName, float], totals: Totals) -> None:
        """Report a published optimizer batch. ``values``: its metrics. ``totals``: the replica's."""
        now = time.monotonic()
        seconds, self._last_publish = now - self._last_publish, now
        deciles = self._deciles.values()
        fates = self._survivorship.take() | deciles
        warning = self._deciles.warning(deciles, self._max_lag_steps)
        if warning:
            log.warning(warning)
        dropped: dict[MetricName, float] = {
            PreprocessorMetric.DROPPED.of(reason=reason): count for reason, count in totals.dropped.items()
        }
        self._metrics.log(
            values
            | fates
            | dropped
            | {PreprocessorMetric.TOKENS_PER_S: values[PreprocessorMetric.TOKENS] / max(seconds, 1e-9)},
            step=batch.step,
        )
        log.info(
            "event=packed step=%d samples=%d tokens=%d micro_batches=%d lockstep=%.3f lag_max=%d survivorship=%s",
            batch.step,
            len(batch.samples),
            values[PreprocessorMetric.TOKENS],
            values[PreprocessorMetric.MICRO_BATCHES],
            values[PreprocessorMetric.LOCKSTEP],
            values[PreprocessorMetric.PACKED_LAG_MAX],
            survivorship_line(fates),
        )
        self._status.progress(step=batch.step, samples_packed=totals.samples_packed, dropped=dict(totals.dropped))

    def close(self) -> None:
        self._metrics.close()
