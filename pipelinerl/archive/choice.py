"""Chooses the rollouts of a step that are kept. The choice depends only on names, so that all processes agree. Pure."""

import hashlib
import statistics
from collections.abc import Iterable, Sequence

from pipelinerl.records.rollouts import Rollout

UNINTERESTING = ("zero_advantage",)
"""Reasons of drops that are not flags, because they are as frequent as solved problems."""
REWARD_WITHOUT_SUCCESS = "reward_without_success"
LONGEST = "longest"


def chosen(sample_ids: Iterable[str], count: int) -> set[str]:
    """Choose ``count`` of the samples (`<group_id>/<attempt>`), with attempts of one problem together.

    A sample that is chosen from a set is also chosen from every subset that contains it.
    """
    return set(sorted(set(sample_ids), key=_place)[:count])


def _place(sample_id: str) -> tuple[bytes, int]:
    group_id, _, attempt = sample_id.rpartition("/")
    return hashlib.blake2b(group_id.encode(), digest_size=8).digest(), int(attempt)


def flags_of(rollouts: Sequence[tuple[Rollout, str]]) -> list[tuple[str, ...]]:
    """Return the flags of each of a step's rollouts, which are given with their fates.

    - The reason why it was dropped, except for groups that a filter drops because their advantages are zero.
    - `reward_without_success`: it failed, but its reward is above the median of those that succeeded.
    - `longest`: it has the most sampled tokens of the step.
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
