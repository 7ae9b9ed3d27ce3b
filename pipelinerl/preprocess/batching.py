"""Cuts the stream of samples into optimizer batches, in its order, and applies `preprocess.lag_drop`. Pure.

What becomes of a sample depends only on those before it in topic `actor`, so a restarted preprocessor rebuilds the same
batch. Step ``b`` trains batch ``b`` on weights of version ``b``: the lag of a token is ``b − version``.
`LengthDeciles` measures the selection bias of a bound on the lag (docs/pacing.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np

from pipelinerl.observability.catalogue import MetricName, PreprocessorMetric
from pipelinerl.preprocess.samples import SCORES, Peer, Sample, Source, with_peers
from pipelinerl.records import TrainingSequence
from pipelinerl.records.drops import DropReason

LagDrop = Literal["never", "rollout", "token"]

WINDOW = 2000
"""Number of latest rollouts that the deciles cover."""
FEWEST = 100
"""Rollouts below which deciles are not meaningful."""
LARGEST_LOSS = 0.1
"""Lost share of the longest decile above which there is a warning."""
DECILES = 10
"""The names of the metrics count them."""
SHORTEST, LONGEST = (PreprocessorMetric.DROPPED_BY_LENGTH.of(decile=i) for i in (1, DECILES))


def without_old_tokens(sample: Sample, oldest_allowed: int) -> Sample | None:
    """``sample`` without training the tokens of versions before ``oldest_allowed``. None if no trained token is left.

    The tokens stay as context, and the advantages do not change. A sequence without young tokens is left out.
    """
    kept = [i for i, (_, sequence) in enumerate(sample.sequences) if (sequence.spans[:, 2] >= oldest_allowed).any()]
    if not kept:
        return None
    masks = {i: _young_tokens(sample.sequences[i][1], oldest_allowed) for i in kept}
    sequences = tuple((sample.sequences[i][0], _masked(sample.sequences[i][1], oldest_allowed)) for i in kept)
    scores = {name: getattr(sample, name) for name in SCORES}
    kept_scores: dict[str, Any] = {
        name: values and tuple(values[i][masks[i]] for i in kept) for name, values in scores.items()
    }
    num_trained = sum(len(sequence.logprobs) for _, sequence in sequences)
    advantages = tuple(sample.advantages[i] for i in kept)
    return replace(
        sample,
        sequences=sequences,
        advantages=advantages,
        members=advantages if len(sample.members) == len(sample.sequences) else sample.members,
        **kept_scores,
        num_tokens=sum(len(sequence.token_ids) for _, sequence in sequences),
        num_trained=num_trained,
        num_masked=sample.num_trained - num_trained,
        oldest_version=min(int(sequence.spans[:, 2].min()) for _, sequence in sequences),
    )


def _young_tokens(sequence: TrainingSequence, oldest_allowed: int) -> np.ndarray:
    """bool [K]: whether each trained token is young enough."""
    lengths = sequence.spans[:, 1] - sequence.spans[:, 0]
    return np.repeat(sequence.spans[:, 2] >= oldest_allowed, lengths)


def _masked(sequence: TrainingSequence, oldest_allowed: int) -> TrainingSequence:
    young_R = sequence.spans[:, 2] >= oldest_allowed
    if young_R.all():
        return sequence
    return msgspec.structs.replace(
        sequence,
        logprobs=sequence.logprobs[_young_tokens(sequence, oldest_allowed)],
        spans=sequence.spans[young_R],
    )


class LengthDeciles:
    """Mean share of its tokens that a rollout loses to the lag bound, by decile of length."""

    def __init__(self) -> None:
        self._seen = np.zeros((WINDOW, 3))
        """Trained tokens before the bound, lag, lost share of the newest rollouts, as a ring."""
        self._count = 0
        self._warned = False

    def add(self, num_trained: int, lag: int, lost: float) -> None:
        """Add a rollout of ``num_trained`` trained tokens before the bound, which removed the share ``lost`` of them.

        ``lag``: of its oldest token, in steps.
        """
        self._seen[self._count % WINDOW] = num_trained, lag, lost
        self._count += 1

    def values(self) -> dict[MetricName, float]:
        """`dropped_by_length/1` (the shortest tenth) … `/10` (the longest). Empty until there are enough rollouts."""
        if self._count < FEWEST:
            return {}
        return {
            PreprocessorMetric.DROPPED_BY_LENGTH.of(decile=i): float(part[:, 2].mean())
            for i, part in enumerate(self._parts(), start=1)
        }

    def warning(self, values: Mapping[MetricName, float], max_lag_steps: int | None) -> str | None:
        """A warning when the longest decile first loses too much, with the bound that would keep it. Else None.

        ``values``: what ``values()`` returned.
        """
        if self._warned or not values:
            return None
        lost, lost_by_shortest = values[LONGEST], values[SHORTEST]
        if lost <= LARGEST_LOSS:
            return None
        self._warned = True
        needed = int(np.ceil(np.quantile(self._parts()[-1][:, 1], 0.99)))
        return (
            f"max_lag_steps={max_lag_steps} takes {lost:.0%} of the longest tenth of the rollouts and "
            f"{lost_by_shortest:.0%} of the shortest: what is trained is shorter than what is sampled. "
            f"Raise max_lag_steps to {needed}, or lower actor.llm_max_rollouts or the longest completion; "
            "preprocess.lag_drop=never trains them all, and bounds their lag in the mean"
        )

    def _parts(self) -> list[np.ndarray]:
        """The rollouts by length, in equal parts. Of equal lengths the older comes first."""
        newest = self._count % WINDOW
        seen = np.roll(self._seen, -newest, axis=0) if self._count > WINDOW else self._seen[: self._count]
        return np.array_split(seen[np.argsort(seen[:, 0], kind="stable")], DECILES)


@dataclass(frozen=True, kw_only=True)
class OptimizerBatch:
    """Samples of `cfg.batch_size` units, rollouts or texts. The last sample may go beyond it."""

    step: int
    samples: tuple[Sample, ...]
    next_source: Source
    """Place directly behind the last sample, where the next batch begins."""
    excess: int = 0
    """Units beyond the batch size: texts of the last rollout. The next batch is not smaller for it."""

    @property
    def size(self) -> int:
        """Rollouts in it, beside which conversations are imitated. Without rollouts, the conversations."""
        return sum(sample.token_weights is None for sample in self.samples) or len(self.samples)


@dataclass(kw_only=True)
class BatchCutter:
    """Fills batches one after the other.

    >>> cutter = BatchCutter(step=0, batch_size=2, max_lag_steps=None)
    >>> reason = cutter.offer(sample)          # None: the sample is in the batch
    >>> batch = cutter.next_batch()            # None: the batch is not full
    """

    step: int
    """Step of the batch being filled."""
    batch_size: int
    max_lag_steps: int | None
    """Largest lag of a trained token, `Config.token_lag_bound`."""
    stride: int = 1
    """Steps from one batch of this preprocessor to its next: the number of preprocessors."""
    lag_drop: LagDrop = "rollout"
    """What becomes of a rollout with an older token, where there is a bound."""
    samples: list[Sample] = field(default_factory=list)

    def resume_at(self, step: int) -> None:
        """Fill the batch of ``step`` next. The batch must be empty."""
        assert not self.samples, f"the batch of step {self.step} has samples"
        self.step = step

    def offer(self, sample: Sample) -> DropReason | None:
        """Add the sample to the batch, or return the reason why it is dropped.

        Its peers are then those that could be trained in the same batch.
        """
        reason = sample.drop_reason or self._lag_reason(sample)
        if reason == DropReason.LAG and self.lag_drop == "token" and self.max_lag_steps is not None:
            young = without_old_tokens(sample, self.step - self.max_lag_steps)
            if young is not None:
                sample, reason = young, None
        if reason is None:
            self.samples.append(with_peers(sample, tuple(filter(self._can_train, sample.peers))))
        return reason

    def lost_share(self, sample: Sample, drop_reason: DropReason | None) -> float:
        """Share of the last offered sample's trained tokens that the lag bound removed.

        ``drop_reason``: what ``offer`` returned.
        """
        if drop_reason is not None:
            return 1.0 if drop_reason == DropReason.LAG else 0.0
        taken = self.samples[-1]
        return taken.num_masked / sample.num_trained if sample.num_trained else 0.0

    def next_batch(self) -> OptimizerBatch | None:
        """Return the batch and begin the next one. None if the batch is not full."""
        excess = sum(sample.size for sample in self.samples) - self.batch_size
        if excess < 0:
            return None
        batch = OptimizerBatch(
            step=self.step, samples=tuple(self.samples), next_source=self.samples[-1].after, excess=excess
        )
        self.samples = []
        self.step += self.stride
        return batch

    def _can_train(self, peer: Peer) -> bool:
        """Whether a rollout of a group can be trained at this step, at least in part."""
        reason = self._lag_reason(peer)
        if reason != DropReason.LAG or self.max_lag_steps is None:
            return reason is None
        return self.lag_drop == "token" and self.step - peer.newest_version <= self.max_lag_steps

    def _lag_reason(self, sample: Sample | Peer) -> DropReason | None:
        if sample.newest_version > self.step:
            return DropReason.FUTURE_VERSION
        if self.max_lag_steps is not None and self.step - sample.oldest_version > self.max_lag_steps:
            return DropReason.LAG
        return None
