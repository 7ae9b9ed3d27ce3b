"""Which rollouts of a step stay. Pure, and a function of names: every process comes to the same choice by itself."""

import hashlib
import statistics
from collections.abc import Iterable, Sequence

from pipelinerl.records.rollouts import Rollout

UNINTERESTING = ("zero_advantage",)
"""Reasons of drops that are no flag: they are as frequent as solved problems."""
REWARD_WITHOUT_SUCCESS = "reward_without_success"
LONGEST = "longest"


def chosen(sample_ids: Iterable[str], count: int) -> set[str]:
    """``count`` of the samples (`<group_id>/<attempt>`), attempts of one problem together.

    What is among the chosen of all samples is among the chosen of any part of them.
    """
    return set(sorted(set(sample_ids), key=_place)[:count])


def _place(sample_id: str) -> tuple[bytes, int]:
    group_id, _, attempt = sample_id.rpartition("/")
    return hashlib.blake2b(group_id.encode(), digest_size=8).digest(), int(attempt)


def flags_of(rollouts: Sequence[tuple[Rollout, str]]) -> list[tuple[str, ...]]:
    """For each of a step's rollouts with its fate: what is remarkable about it.

    - the reason why it was dropped, but for solved or hopeless groups that a filter leaves out,
    - `reward_without_success`: it failed, and has a higher reward than the median of those that succeeded,
    - `longest`: no other rollout of the step has as many sampled tokens.
    """
    wins = [rollout.reward for rollout, _ in rollouts if rollout.metrics.get("success")]
    usual = statistics.median(wins) if wins else None
    lengths = [sum(len(sequence.logprobs) for sequence in rollout.sequences) for rollout, _ in rollouts]
    longest = lengths.index(max(lengths)) if lengths else -1
    found = []
    for index, (rollout, fate) in enumerate(rollouts):
        flags = [fate] if fate not in ("trained", *UNINTERESTING) else []
        if usual is not None and rollout.metrics.get("success") == 0 and rollout.reward > usual:
            flags.append(REWARD_WITHOUT_SUCCESS)
        if index == longest:
            flags.append(LONGEST)
        found.append(tuple(flags))
    return found
