"""Records of a step kept for people after the streams are trimmed: rollouts and the trainer's numbers for them.

Shapes: K trained tokens of a sequence.
"""

import msgspec
import numpy as np

from pipelinerl.records.rollouts import Rollout

TRAINED = "trained"
"""Outcome of a rollout in the batch of its step. Any other outcome is the reason for dropping the rollout."""


class ArchivedRollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rollout and its outcome."""

    group_id: str
    domain: str
    dataset: str
    problem: str
    """As in `RolloutGroup`."""
    dispatched_version: int
    rollout: Rollout
    outcome: str = msgspec.field(default=TRAINED, name="fate")
    advantages: tuple[float | None, ...] = ()
    """One per sequence of the rollout, None for a sequence that trains nothing. Empty if none were computed."""
    flags: tuple[str, ...] = ()
    """Reasons to keep the rollout longer than others (`archive.choice`)."""

    @property
    def sample_id(self) -> str:
        return f"{self.group_id}/{self.rollout.attempt}"


class ArchivedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts that were packed for an optimizer step or dropped while its batch was filled."""

    step: int
    """As in `MicroBatch`."""
    rollouts: tuple[ArchivedRollout, ...]


class ScoredSequence(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's numbers for one training sequence, in the order of its trained tokens."""

    sequence_id: str
    """`<group_id>/<attempt>/<sequence>`"""
    logprobs: np.ndarray
    """float32 [K]: log-probabilities under the weights before the step."""
    entropy: np.ndarray
    """float16 [K], nats"""
    altered: np.ndarray
    """bool [K]: the loss's clip or an off-policy correction acts on the token."""


class ScoredStep(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's numbers of one optimizer step on one rank."""

    step: int
    sequences: tuple[ScoredSequence, ...]
