"""Compares the replayed figures of a step with the recorded ones, bit for bit. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pipelinerl.inspect.replay.folder import Recorded, ReplayedSequence, ReplayedStep


@dataclass
class Agreement:
    """How many values of one kind were compared, and how many differ."""

    compared: int = 0
    different: int = 0
    largest: float = 0.0
    """Largest difference."""

    def add(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        if len(ours) != len(theirs):
            self.compared += max(len(ours), len(theirs))
            self.different += max(len(ours), len(theirs))
            self.largest = float("inf")
            return
        unequal = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
        self.compared += len(ours)
        self.different += int(unequal.sum())
        if unequal.any():
            gaps = np.abs(ours[unequal].astype(np.float64) - theirs[unequal])
            self.largest = max(self.largest, float(np.nan_to_num(gaps, nan=np.inf).max()))


@dataclass
class StepComparison:
    """The step of the run against the replayed one."""

    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(recorded, replayed) of each metric that differs."""
    metrics_compared: int = 0
    logprobs: Agreement = field(default_factory=Agreement)
    entropy: Agreement = field(default_factory=Agreement)
    advantages: Agreement = field(default_factory=Agreement)
    sequences: set[str] = field(default_factory=set)
    """Ids of the sequences that differ, or that only one of the two has."""

    @property
    def is_equal(self) -> bool:
        return not self.metrics and not self.sequences

    @property
    def is_empty(self) -> bool:
        """Whether the run recorded nothing to compare with."""
        return not self.metrics_compared and not self.logprobs.compared


def compare_step(recorded: Recorded, step: ReplayedStep) -> StepComparison:
    found = StepComparison()
    for name, ours in step.metrics.items():
        if name in recorded.metrics:
            found.metrics_compared += 1
            if ours != recorded.metrics[name]:
                found.metrics[name] = (recorded.metrics[name], ours)
    if step.sequences:
        _compare_sequences(found, recorded, {sequence.sequence_id: sequence for sequence in step.sequences})
    return found


def _compare_sequences(found: StepComparison, recorded: Recorded, ours: Mapping[str, ReplayedSequence]) -> None:
    for theirs in recorded.sequences:
        mine = ours.get(theirs.sequence_id)
        if mine is None:
            found.sequences.add(theirs.sequence_id)
            continue
        before = found.logprobs.different + found.entropy.different
        found.logprobs.add(mine.logprobs, theirs.logprobs)  # the ratios are functions of them
        found.entropy.add(mine.entropy.astype(np.float16), theirs.entropy)
        if found.logprobs.different + found.entropy.different > before:
            found.sequences.add(theirs.sequence_id)
    for name, advantage in recorded.advantages.items():
        if name not in ours:
            continue  # archived with its step, but dropped
        expected = np.full(len(ours[name].advantages), advantage, np.float32)
        before = found.advantages.different
        found.advantages.add(ours[name].advantages, expected)
        if found.advantages.different > before:
            found.sequences.add(name)
