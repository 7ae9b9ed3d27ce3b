"""Advantages of the members of one group (docs/algorithms.md §1). Pure functions, float64.

The reward mode is said by the domain and is the same for all members of a group; nothing is inferred from the numbers.
With `rollout`, a rollout is ONE member of its group, however many turns and sequences it has. With `steps` the baseline
at step t is taken over the returns from t on of ALL members; a member that had ended before t collects nothing more, so
its return is 0. With `texts` (PipelineRL's) it is taken over the texts at step t, that is, over the members that got
there.

Worked example, `loo`, `steps`, rewards of three members a = (1, 2), b = (0, 1, 3), c = (2,):

    return from step   0    1    2        advantage at step   0               1               2
    a                  3    2    0        a                   3 − 3 = 0       2 − 2 = 0       –
    b                  4    4    3        b                   4 − 2.5 = 1.5   4 − 1 = 3       3 − 0 = 3
    c                  2    0    0        c                   2 − 3.5 = −1.5  –               –

Shapes: n members of a group, K steps.
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


def step_returns(rewards: Sequence[np.ndarray], discount: float = 1.0) -> np.ndarray:
    """float64 [n, K]: Σ_{k ≥ t} discount^(k − t) · r_k for every member at every step t; 0 after its end."""
    returns_nK = np.zeros((len(rewards), max((len(member) for member in rewards), default=0)))
    for i, member in enumerate(rewards):
        returns_nK[i, : len(member)] = member
    for t in range(returns_nK.shape[1] - 2, -1, -1):
        returns_nK[:, t] += discount * returns_nK[:, t + 1]
    return returns_nK


def text_advantages(rewards: Sequence[np.ndarray], kind: AdvantageKind) -> list[np.ndarray]:
    """Advantage of every text among the texts of the same step: those of the members that reached it."""
    advantages = [np.zeros(len(member)) for member in rewards]
    for t in range(max((len(member) for member in rewards), default=0)):
        reached = [i for i, member in enumerate(rewards) if len(member) > t]
        found = group_advantages(np.array([rewards[i][t] for i in reached], np.float64), kind)
        for i, advantage in zip(reached, found, strict=True):
            advantages[i][t] = advantage
    return advantages
