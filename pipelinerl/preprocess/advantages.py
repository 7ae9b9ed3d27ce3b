"""Advantages of the members of one group (docs/algorithms.md §1). Pure functions, float64.

A rollout is ONE member of its group, however many turns and sequences it has: a baseline is the mean over members and
never over those that happened to reach a turn. Where a domain gives per-step rewards, a sequence that begins with turn
t carries the advantage of the member's *return from t on*, against all members' returns from t on; a member that had
ended before t collects nothing more, so its return from t on is 0.

Worked example, `loo`, step rewards of three members a = (1, 2), b = (0, 1, 3), c = (2,):

    return from turn   0    1    2        advantage at turn   0               1               2
    a                  3    2    0        a                   3 − 3 = 0       2 − 2 = 0       –
    b                  4    4    3        b                   4 − 2.5 = 1.5   4 − 1 = 3       3 − 0 = 3
    c                  2    0    0        c                   2 − 3.5 = −1.5  –               –

Shapes: n members of a group, K points in time at which a sequence begins.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

AdvantageKind = Literal["loo", "group_mean", "group_std", "batch_std", "value"]

STD_EPSILON = 1e-4
MIN_STD = 1e-6


def group_advantages(returns_nK: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    """Advantage of every member at every point in time.

    Args:
        returns_nK: float64 [n] or [n, K]; members along the first axis.
        kind: `batch_std` yields the leave-one-out advantage that `batch_std_scale` divides later, `value` the return
            itself, from which the trainer subtracts its value estimate.

    Returns:
        float64, shape of ``returns_nK``.
    """
    n = len(returns_nK)
    if kind == "value":
        return returns_nK.copy()
    centred = returns_nK - returns_nK.mean(axis=0)
    if n == 1:
        return np.zeros_like(centred)
    if kind == "group_mean":
        return centred
    if kind == "group_std":
        return centred / (returns_nK.std(axis=0, ddof=1) + STD_EPSILON)
    return centred * (n / (n - 1))


def batch_std_scale(advantages: np.ndarray) -> float:
    """Factor that gives an optimizer batch's advantages a standard deviation (ddof = 1) of 1 (ScaleRL, 2510.13786).

    1 where there is nothing to normalise: a single advantage, or all (nearly) the same.
    """
    if len(advantages) < 2:
        return 1.0
    std = float(np.std(advantages, ddof=1))
    return 1.0 / std if std > MIN_STD else 1.0


def returns_from_turn(
    turns: Sequence[Sequence[int]], rewards: Sequence[Sequence[float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns-to-go of the members of a group at every turn with which some sequence begins.

    Args:
        turns: for every member the first turn of each of its sequences.
        rewards: for every member the step reward of each of its sequences.

    Returns:
        ``points_K`` int64, ascending distinct turns, and ``returns_nK`` float64: for each member the sum of the rewards
        of its sequences that begin with this turn or later (0 after its end).
    """
    points_K = np.unique(np.concatenate([np.asarray(member, dtype=np.int64) for member in turns]))
    returns_nK = np.zeros((len(turns), len(points_K)))
    for i, (member_turns, member_rewards) in enumerate(zip(turns, rewards, strict=True)):
        np.add.at(returns_nK[i], np.searchsorted(points_K, member_turns), member_rewards)
    return points_K, np.cumsum(returns_nK[:, ::-1], axis=1)[:, ::-1]
