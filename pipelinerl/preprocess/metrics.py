"""Metrics of the preprocessor (packing, lag, survivorship), and their report: a log line per batch and the status.

Survivorship shows whether the dropped rollouts differ from the trained ones, by reason of the drop.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.membership.role import RoleContext
from pipelinerl.observability.catalogue import MetricName, PreprocessorMetric
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.preprocess.batching import BatchCutter, LengthDeciles, OptimizerBatch
from pipelinerl.preprocess.samples import Sample
from pipelinerl.preprocess.totals import Totals
from pipelinerl.records import MicroBatch
from pipelinerl.records.archive import TRAINED
from pipelinerl.records.drops import DropReason
from pipelinerl.records.prefixes import prefixes_of


@dataclass
class OutcomeTotals:
    """Counts and sums of the rollouts with one outcome."""

    count: int = 0
    tokens: int = 0
    rewarded: int = 0
    reward: float = 0.0

    def add(self, sample: Sample) -> None:
        self.count += 1
        self.tokens += sample.num_trained
        if math.isfinite(sample.reward):
            self.rewarded += 1
            self.reward += sample.reward


class Survivorship:
    """Collects the outcomes of rollouts from one published batch to the next."""

    def __init__(self) -> None:
        self._totals: dict[str, OutcomeTotals] = defaultdict(OutcomeTotals)

    def add(self, sample: Sample, drop_reason: DropReason | None) -> None:
        """Add a decided rollout. ``drop_reason`` None: it is trained."""
        self._totals[drop_reason or TRAINED].add(sample)

    def pop_values(self) -> dict[MetricName, float]:
        """Return count, mean tokens and mean reward of every outcome, and reset."""
        values: dict[MetricName, float] = {}
        for name, totals in sorted(self._totals.items()):
            values[PreprocessorMetric.SURVIVORSHIP_COUNT.of(outcome=name)] = totals.count
            values[PreprocessorMetric.SURVIVORSHIP_MEAN_TOKENS.of(outcome=name)] = totals.tokens / totals.count
            if totals.rewarded:
                values[PreprocessorMetric.SURVIVORSHIP_MEAN_REWARD.of(outcome=name)] = totals.reward / totals.rewarded
        self._totals.clear()
        return values


def survivorship_line(values: Mapping[MetricName, float]) -> str:
    """One line for the log: `trained n=64 tokens=812.0 reward=0.413, lag n=2 tokens=5120.0 reward=0.100`."""
    counts = PreprocessorMetric.SURVIVORSHIP_COUNT.found(values)
    parts = []
    for outcome in sorted(counts, key=lambda name: (name != TRAINED, name)):
        tokens = values[PreprocessorMetric.SURVIVORSHIP_MEAN_TOKENS.of(outcome=outcome)]
        reward = values.get(PreprocessorMetric.SURVIVORSHIP_MEAN_REWARD.of(outcome=outcome), float("nan"))
        parts.append(f"{outcome} n={counts[outcome]:.0f} tokens={tokens:.1f} reward={reward:.3f}")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class PackingQuality:
    """How well an optimizer batch fills its micro-batches, by the tokens that are computed. Includes the empty ones."""

    micro_batches: int
    empty: int
    tokens: int
    filled: float
    """Tokens / (micro-batches × capacity)."""
    level: float
    """Tokens / (micro-batches × longest micro-batch). 1 when all are equal."""
    rank_imbalance: float
    """Largest relative deviation of a rank's tokens from the mean over ranks."""
    lockstep: float
    """Tokens / (ranks × Σ over rounds of the longest micro-batch)."""


def packing_quality(tokens: np.ndarray, empty: int, capacity: int) -> PackingQuality:
    """Compute the quality of a packing.

    Args:
        tokens: int64 [ranks, rounds], 0 for an empty micro-batch.
        empty: number of empty micro-batches.
        capacity: tokens that a micro-batch may hold.
    """
    ranks, _ = tokens.shape
    total = int(tokens.sum())
    per_rank = tokens.sum(axis=1)
    return PackingQuality(
        micro_batches=tokens.size,
        empty=empty,
        tokens=total,
        filled=total / (tokens.size * capacity),
        level=total / (tokens.size * int(tokens.max())),
        rank_imbalance=float(np.abs(per_rank / per_rank.mean() - 1).max()),
        lockstep=total / (ranks * int(tokens.max(axis=0).sum())),
    )


def quality_of(
    batches: Sequence[Sequence[MicroBatch]], capacity: int, *, share_prefixes: bool = False
) -> PackingQuality:
    """Quality of collated micro-batches [rank][round] that may compute ``capacity`` tokens each."""

    def computed(record: MicroBatch) -> int:
        if record.sentinel:
            return 0
        return len(record.token_ids) - (int(prefixes_of(record)[1].sum()) if share_prefixes else 0)

    tokens = np.array([[computed(record) for record in rank] for rank in batches], dtype=np.int64)
    return packing_quality(tokens, sum(record.sentinel for rank in batches for record in rank), capacity)


def batch_metrics(batch: OptimizerBatch, quality: PackingQuality) -> dict[MetricName, float]:
    """Metrics of one published optimizer batch. One without rollouts has no rewards, advantages and lag."""
    rollouts = [sample for sample in batch.samples if sample.token_weights is None]
    of_rollouts: dict[MetricName, float] = {}
    if rollouts:
        lags = np.array([batch.step - sample.oldest_version for sample in rollouts])
        of_rollouts = {
            PreprocessorMetric.REWARD: float(np.mean([sample.reward for sample in rollouts])),
            PreprocessorMetric.ADVANTAGE_STD: float(np.concatenate([sample.advantages for sample in rollouts]).std()),
            PreprocessorMetric.PACKED_LAG_MEAN: float(lags.mean()),
            PreprocessorMetric.PACKED_LAG_MAX: int(lags.max()),
        }
    if averages := [versions_K for sample in rollouts for versions_K in sample.teacher_versions or ()]:
        of_rollouts[PreprocessorMetric.TEACHER_LAG_MEAN] = batch.step - float(np.concatenate(averages).mean())
    return of_rollouts | {
        PreprocessorMetric.SAMPLES: batch.size,
        PreprocessorMetric.SEQUENCES: sum(len(sample.sequences) for sample in batch.samples),
        PreprocessorMetric.TOKENS: sum(sample.num_tokens for sample in batch.samples),
        PreprocessorMetric.TOKENS_TRAINED: sum(sample.num_trained for sample in batch.samples),
        PreprocessorMetric.TOKENS_MASKED_BY_LAG: sum(sample.num_masked for sample in batch.samples),
        PreprocessorMetric.ZERO_WEIGHT: sum(not sample.num_counted for sample in batch.samples),
        PreprocessorMetric.MICRO_BATCHES: quality.micro_batches,
        PreprocessorMetric.EMPTY_MICRO_BATCHES: quality.empty,
        PreprocessorMetric.FILLED: quality.filled,
        PreprocessorMetric.RANK_IMBALANCE: quality.rank_imbalance,
        PreprocessorMetric.LOCKSTEP: quality.lockstep,
    }


log = logging.getLogger(__name__)


class BatchReport:
    """Reports the outcomes of samples and the batches of one replica."""

    def __init__(self, ctx: RoleContext):
        self._status, self._max_lag_steps = ctx.status, ctx.cfg.max_lag_steps
        name = ctx.job.kind if ctx.job.replica_idx == 0 else ctx.job.name
        self._metrics = MetricsLogger(ctx.cfg, ctx.run_dir, name)
        self._survivorship = Survivorship()
        self._deciles = LengthDeciles()
        self._last_publish = time.monotonic()

    def decided(self, sample: Sample, reason: DropReason | None, cutter: BatchCutter) -> None:
        """Record a sample's outcome. Call it right after ``cutter`` decided it."""
        self._survivorship.add(sample, reason)
        if reason in (None, DropReason.LAG):
            lag = cutter.step - sample.oldest_version
            self._deciles.add(sample.num_trained, lag, cutter.lost_share(sample, reason))

    def published(self, batch: OptimizerBatch, values: dict[MetricName, float], totals: Totals) -> None:
        """Report a published optimizer batch. ``values``: its metrics. ``totals``: the replica's."""
        now = time.monotonic()
        seconds, self._last_publish = now - self._last_publish, now
        deciles = self._deciles.values()
        outcomes = self._survivorship.pop_values() | deciles
        warning = self._deciles.warning(deciles, self._max_lag_steps)
        if warning:
            log.warning(warning)
        dropped: dict[MetricName, float] = {
            PreprocessorMetric.DROPPED.of(reason=reason): count for reason, count in totals.dropped.items()
        }
        self._metrics.log(
            values
            | outcomes
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
            values.get(PreprocessorMetric.PACKED_LAG_MAX, 0),
            survivorship_line(outcomes),
        )
        self._status.progress(step=batch.step, samples_packed=totals.samples_packed, dropped=dict(totals.dropped))

    def close(self) -> None:
        self._metrics.close()
