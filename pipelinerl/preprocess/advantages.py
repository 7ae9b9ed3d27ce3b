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

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from pipelinerl.config.load import resolve_function
from pipelinerl.config.objectives import ADVANTAGES, keyword_arguments
from pipelinerl.errors import ConfigError

STD_EPSILON = 1e-4
MIN_STD = 1e-6


def leave_one_out(returns_nK: np.ndarray) -> np.ndarray:
    """r_i − mean of the others' (RLOO, 2402.14740)."""
    n = len(returns_nK)
    return group_mean(returns_nK) * (n / (n - 1)) if n > 1 else np.zeros_like(returns_nK)


def group_mean(returns_nK: np.ndarray) -> np.ndarray:
    """r_i − mean of all (Dr. GRPO, 2503.20783)."""
    return returns_nK - returns_nK.mean(axis=0)


def group_std(returns_nK: np.ndarray) -> np.ndarray:
    """(r_i − mean)/(std + 1e-4), std with n − 1 in the denominator (GRPO, 2402.03300)."""
    if len(returns_nK) == 1:
        return np.zeros_like(returns_nK)
    return group_mean(returns_nK) / (returns_nK.std(axis=0, ddof=1) + STD_EPSILON)


def returns(returns_nK: np.ndarray) -> np.ndarray:
    """r_i, from which the trainer subtracts its value estimate."""
    return returns_nK.copy()


@cache
def find_advantage(name: str) -> Callable[..., np.ndarray]:
    """The function of a short or dotted name."""
    return resolve_function(ADVANTAGES.get(name, name))


def group_advantages(returns_nK: np.ndarray, kind: str, kwargs: Mapping[str, Any] | None = None) -> np.ndarray:
    """Advantage of every member at every step.

    Args:
        returns_nK: float64 [n] or [n, K]; members along the first axis.
        kind: name in the registry, or dotted name of a function ``f(returns_nK, *, …)`` of the same shapes. `batch_std`
            yields the leave-one-out advantage that `batch_std_scale` divides later, `value` the return itself.
        kwargs: keyword arguments of a function of your own (`finetune.rl.advantage_kwargs`).

    Returns:
        float64, shape of ``returns_nK``.
    Raises:
        ConfigError: the function does not take ``kwargs``, or returned another shape.
    """
    function = find_advantage(kind)
    found = function(returns_nK, **keyword_arguments("advantage", function, {}, kwargs or {}))
    found_nK = np.asarray(found, dtype=np.float64)
    if found_nK.shape != returns_nK.shape:
        raise ConfigError(
            f"`finetune.rl.advantage` is {kind}: it returned shape {found_nK.shape} for returns of shape "
            f"{returns_nK.shape}; both must be the same"
        )
    return found_nK


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


def text_advantages(
    rewards: Sequence[np.ndarray], kind: str, kwargs: Mapping[str, Any] | None = None
) -> list[np.ndarray]:
    """Advantage of every text among the texts of the same step: those of the members that reached it."""
    advantages = [np.zeros(len(member)) for member in rewards]
    for t in range(max((len(member) for member in rewards), default=0)):
        reached = [i for i, member in enumerate(rewards) if len(member) > t]
        found = group_advantages(np.array([rewards[i][t] for i in reached], np.float64), kind, kwargs)
        for i, advantage in zip(reached, found, strict=True):
            advantages[i][t] = advantage
    return advantages
