"""Applies the lag bound: masks tokens that are too old, and measures what the bound removes. Pure.

A rollout whose oldest token exceeds `max_lag_steps` is dropped, or, with `preprocess.lag_drop=token`, keeps the tokens
that are young enough. Long rollouts are the oldest, so both introduce a selection bias: the first among rollouts, the
second among positions in a rollout. `LengthDeciles` measures it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from pipelinerl.observability.catalogue import MetricName, PreprocessorMetric
from pipelinerl.preprocess.samples import Sample
from pipelinerl.records import TrainingSequence

LagDrop = Literal["rollout", "token"]

WINDOW = 2000
"""Number of latest rollouts that the deciles cover."""
FEWEST = 100
"""Rollouts below which deciles are not meaningful."""
LARGEST_LOSS = 0.1
"""Lost share of the longest decile above which there is a warning."""
DECILES = 10
SHORTEST, LONGEST = (PreprocessorMetric.DROPPED_BY_LENGTH.of(decile=i) for i in (1, DECILES))


def without_old_tokens(sample: Sample, oldest_allowed: int) -> Sample | None:
    """``sample`` without training the tokens of versions before ``oldest_allowed``. None if no trained token is left.

    The tokens stay in their sequences as context. A sequence without young tokens is left out, with its advantage. The
    other advantages and the group's size do not change.
    """
    kept = [i for i, (_, sequence) in enumerate(sample.sequences) if (sequence.spans[:, 2] >= oldest_allowed).any()]
    if not kept:
        return None
    masks = {i: _young_tokens(sample.sequences[i][1], oldest_allowed) for i in kept}
    sequences = tuple((sample.sequences[i][0], _masked(sample.sequences[i][1], oldest_allowed)) for i in kept)
    ref = sample.ref_logprobs
    num_trained = sum(len(sequence.logprobs) for _, sequence in sequences)
    advantages = tuple(sample.advantages[i] for i in kept)
    return replace(
        sample,
        sequences=sequences,
        advantages=advantages,
        members=advantages if len(sample.members) == len(sample.sequences) else sample.members,
        ref_logprobs=None if ref is None else tuple(ref[i][masks[i]] for i in kept),
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
        """Add a rollout.

        Args:
            num_trained: its trained tokens before the bound.
            lag: of its oldest token, in steps.
            lost: share of its tokens that the bound removed.
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

        Args:
            values: what ``values()`` returned.
            max_lag_steps: the bound.
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
            "preprocess.lag_drop=token keeps what is young enough of them"
        )

    def _parts(self) -> list[np.ndarray]:
        """The rollouts by length, in equal parts. Of equal lengths the older comes first."""
        newest = self._count % WINDOW
        seen = np.roll(self._seen, -newest, axis=0) if self._count > WINDOW else self._seen[: self._count]
        return np.array_split(seen[np.argsort(seen[:, 0], kind="stable")], DECILES)
