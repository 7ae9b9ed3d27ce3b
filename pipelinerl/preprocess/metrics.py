"""Metrics of the preprocessor: packing, lag and survivorship. Pure.

Survivorship shows whether the dropped rollouts differ from the trained ones. For each reason of a drop, and for the
trained rollouts, it reports count, mean length and mean reward.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.observability.catalogue import MetricName, PreprocessorMetric
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.samples import Sample
from pipelinerl.records import MicroBatch
from pipelinerl.records.archive import TRAINED


@dataclass
class Fates:
    """Counts and sums of the rollouts with one fate."""

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
    """Collects the fates of rollouts from one published batch to the next."""

    def __init__(self) -> None:
        self._fates: dict[str, Fates] = defaultdict(Fates)

    def add(self, sample: Sample, drop_reason: str | None) -> None:
        """Add a decided rollout. ``drop_reason`` None: it is trained."""
        self._fates[drop_reason or TRAINED].add(sample)

    def take(self) -> dict[MetricName, float]:
        """Return count, mean tokens and mean reward of every fate, and reset."""
        values: dict[MetricName, float] = {}
        for name, fate in sorted(self._fates.items()):
            values[PreprocessorMetric.SURVIVORSHIP_COUNT.of(fate=name)] = fate.count
            values[PreprocessorMetric.SURVIVORSHIP_MEAN_TOKENS.of(fate=name)] = fate.tokens / fate.count
            if fate.rewarded:
                values[PreprocessorMetric.SURVIVORSHIP_MEAN_REWARD.of(fate=name)] = fate.reward / fate.rewarded
        self._fates.clear()
        return values


def survivorship_line(values: Mapping[MetricName, float]) -> str:
    """One line for the log: `trained n=64 tokens=812.0 reward=0.413, lag n=2 tokens=5120.0 reward=0.100`."""
    counts = PreprocessorMetric.SURVIVORSHIP_COUNT.found(values)
    parts = []
    for fate in sorted(counts, key=lambda name: (name != TRAINED, name)):
        tokens = values[PreprocessorMetric.SURVIVORSHIP_MEAN_TOKENS.of(fate=fate)]
        reward = values.get(PreprocessorMetric.SURVIVORSHIP_MEAN_REWARD.of(fate=fate), float("nan"))
        parts.append(f"{fate} n={counts[fate]:.0f} tokens={tokens:.1f} reward={reward:.3f}")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class PackingQuality:
    """How well an optimizer batch fills its micro-batches. Sentinels count as empty."""

    micro_batches: int
    sentinels: int
    tokens: int
    filled: float
    """Tokens / (micro-batches × capacity)."""
    level: float
    """Tokens / (micro-batches × longest micro-batch). 1 when all are equal."""
    rank_imbalance: float
    """Largest relative deviation of a rank's tokens from the mean over ranks."""
    lockstep: float
    """Tokens / (ranks × Σ over rounds of the longest micro-batch)."""


def packing_quality(tokens: np.ndarray, sentinels: int, capacity: int) -> PackingQuality:
    """Compute the quality of a packing.

    Args:
        tokens: int64 [ranks, rounds], tokens of each micro-batch, 0 for a sentinel.
        sentinels: number of sentinels.
        capacity: tokens that a micro-batch may hold.
    """
    ranks, _ = tokens.shape
    total = int(tokens.sum())
    per_rank = tokens.sum(axis=1)
    return PackingQuality(
        micro_batches=tokens.size,
        sentinels=sentinels,
        tokens=total,
        filled=total / (tokens.size * capacity),
        level=total / (tokens.size * int(tokens.max())),
        rank_imbalance=float(np.abs(per_rank / per_rank.mean() - 1).max()),
        lockstep=total / (ranks * int(tokens.max(axis=0).sum())),
    )


def quality_of(batches: Sequence[Sequence[MicroBatch]], capacity: int) -> PackingQuality:
    """Quality of collated micro-batches [rank][round] that may hold ``capacity`` tokens each."""
    tokens = np.array([[0 if mb.sentinel else len(mb.token_ids) for mb in rank] for rank in batches], dtype=np.int64)
    return packing_quality(tokens, sum(mb.sentinel for rank in batches for mb in rank), capacity)


def batch_metrics(batch: OptimizerBatch, quality: PackingQuality) -> dict[MetricName, float]:
    """Metrics of one published optimizer batch."""
    lags = np.array([batch.step - sample.oldest_version for sample in batch.samples])
    advantages = np.concatenate([np.asarray(sample.advantages) for sample in batch.samples])
    return {
        PreprocessorMetric.SAMPLES: len(batch.samples),
        PreprocessorMetric.SEQUENCES: len(advantages),
        PreprocessorMetric.TOKENS: quality.tokens,
        PreprocessorMetric.TOKENS_TRAINED: sum(sample.num_trained for sample in batch.samples),
        PreprocessorMetric.REWARD: float(np.mean([sample.reward for sample in batch.samples])),
        PreprocessorMetric.ADVANTAGE_STD: float(advantages.std()),
        PreprocessorMetric.TOKENS_MASKED_BY_LAG: sum(sample.num_masked for sample in batch.samples),
        PreprocessorMetric.ZERO_WEIGHT: sum(not sample.weighted for sample in batch.samples),
        PreprocessorMetric.PACKED_LAG_MEAN: float(lags.mean()),
        PreprocessorMetric.PACKED_LAG_MAX: int(lags.max()),
        PreprocessorMetric.MICRO_BATCHES: quality.micro_batches,
        PreprocessorMetric.SENTINELS: quality.sentinels,
        PreprocessorMetric.FILLED: quality.filled,
        PreprocessorMetric.RANK_IMBALANCE: quality.rank_imbalance,
        PreprocessorMetric.LOCKSTEP: quality.lockstep,
    }
