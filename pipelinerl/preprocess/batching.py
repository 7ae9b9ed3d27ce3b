"""Cuts the stream of samples into optimizer batches, oldest first, and enforces the lag bound. Pure.

Every sample is offered exactly once, in the order of topic `actor`, and its fate depends only on the samples before it.
A restarted preprocessor that replays the topic from the start of a batch therefore rebuilds the same batch. Step ``b``
trains batch ``b`` on weights of version ``b``, so the lag of a token is ``b − version``.
"""

from dataclasses import dataclass, field

from pipelinerl.preprocess.lag import LagDrop, without_old_tokens
from pipelinerl.preprocess.samples import INVALID, LAG, Sample, Source


@dataclass(frozen=True, kw_only=True)
class OptimizerBatch:
    """Exactly `cfg.batch_size` samples."""

    step: int
    samples: tuple[Sample, ...]
    next_source: Source
    """Place directly behind the last sample, where the next batch begins."""


@dataclass(kw_only=True)
class BatchCutter:
    """Fills batches one after the other.

    >>> cutter = BatchCutter(step=0, batch_size=2, max_lag_steps=None)
    >>> reason = cutter.offer(sample)          # None: the sample is in the batch
    >>> batch = cutter.take()                  # None: the batch is not full
    """

    step: int
    """Step of the batch being filled."""
    batch_size: int
    max_lag_steps: int | None
    stride: int = 1
    """Steps from one batch of this preprocessor to its next: the number of preprocessors."""
    lag_drop: LagDrop = "rollout"
    samples: list[Sample] = field(default_factory=list)

    def resume_at(self, step: int) -> None:
        """Fill the batch of ``step`` next. The batch must be empty."""
        assert not self.samples, f"the batch of step {self.step} has samples"
        self.step = step

    def offer(self, sample: Sample) -> str | None:
        """Add the sample to the batch, or return the reason why it is dropped."""
        reason = sample.drop_reason or self._lag_reason(sample)
        if reason is None:
            self.samples.append(sample)
        elif reason == LAG and self.lag_drop == "token" and self.max_lag_steps is not None:
            young = without_old_tokens(sample, self.step - self.max_lag_steps)
            if young is not None:
                self.samples.append(young)
                return None
        return reason

    def lost_share(self, sample: Sample, drop_reason: str | None) -> float:
        """Share of the last offered sample's trained tokens that the lag bound removed.

        ``drop_reason``: what ``offer`` returned.
        """
        if drop_reason is not None:
            return 1.0 if drop_reason == LAG else 0.0
        taken = self.samples[-1]
        return taken.num_masked / sample.num_trained if sample.num_trained else 0.0

    def take(self) -> OptimizerBatch | None:
        """Return the batch and begin the next one. None if the batch is not full."""
        if len(self.samples) < self.batch_size:
            return None
        batch = OptimizerBatch(step=self.step, samples=tuple(self.samples), next_source=self.samples[-1].after)
        self.samples = []
        self.step += self.stride
        return batch

    def _lag_reason(self, sample: Sample) -> str | None:
        if sample.newest_version > self.step:
            return INVALID
        if self.max_lag_steps is not None and self.step - sample.oldest_version > self.max_lag_steps:
            return LAG
        return None
