"""Advantages of the members of one group (docs/algorithms.md §1, with worked examples). Pure functions, float64.

The domain sets the reward mode, which is the same for all members of a group. It is never inferred from the rewards.

Shapes: n members of a group, K steps.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.objectives import ADVANTAGES, function_signature, keyword_arguments
from pipelinerl.errors import ConfigError

STD_EPSILON = 1e-4
"""GRPO's, which keeps nearly equal rewards from advantages without bound."""
MIN_STD = 1e-6
"""Deviation below which the advantages of a batch differ by rounding alone."""


def leave_one_out(returns_nK: np.ndarray) -> np.ndarray:
    """r_i − mean of the others' (RLOO, arXiv:2402.14740). 0 for a single member."""
    n = len(returns_nK)
    return group_mean(returns_nK) * (n / (n - 1)) if n > 1 else np.zeros_like(returns_nK)


def group_mean(returns_nK: np.ndarray) -> np.ndarray:
    """r_i − mean of all (Dr. GRPO, arXiv:2503.20783)."""
    return returns_nK - returns_nK.mean(axis=0)


def group_std(returns_nK: np.ndarray) -> np.ndarray:
    """(r_i − mean)/(std + 1e-4), std with ddof = 1 (GRPO, arXiv:2402.03300). 0 for a single member."""
    if len(returns_nK) == 1:
        return np.zeros_like(returns_nK)
    return group_mean(returns_nK) / (returns_nK.std(axis=0, ddof=1) + STD_EPSILON)


def returns(returns_nK: np.ndarray) -> np.ndarray:
    """r_i. The trainer subtracts its value estimate."""
    return returns_nK.copy()


@cache
def find_advantage(name: str) -> Callable[..., np.ndarray]:
    """The advantage function with this name in the registry, or with this dotted name."""
    return resolve_function(ADVANTAGES.get(name, name))


def group_advantages(returns_nK: np.ndarray, kind: str, kwargs: Mapping[str, Any] | None = None) -> np.ndarray:
    """Compute the advantage of every member at every step.

    Args:
        returns_nK: float64 [n] or [n, K], members along the first axis.
        kind: name in the registry, or dotted name of a function ``f(returns_nK, *, …)`` that keeps the shape.
            `batch_std` gives the leave-one-out advantage and `gdpo` that of `group_std`, both to be scaled by
            `batch_std_scale`. `value` gives the return.
        kwargs: keyword arguments of your own function (`finetune.rl.advantage_kwargs`).

    Returns:
        float64, shape of ``returns_nK``.
    Raises:
        ConfigError: the function does not accept ``kwargs``, or returned another shape.
    """
    function = find_advantage(kind)
    name = getattr(function, "__qualname__", type(function).__name__)
    found = function(returns_nK, **keyword_arguments("advantage", name, function_signature(function), {}, kwargs or {}))
    found_nK = np.asarray(found, dtype=np.float64)
    if found_nK.shape != returns_nK.shape:
        raise ConfigError(
            f"`finetune.rl.advantage` is {kind}: it returned shape {found_nK.shape} for returns of shape "
            f"{returns_nK.shape}; both must be the same"
        )
    return found_nK


def batch_std_scale(advantages: np.ndarray) -> float:
    """Factor that scales a batch's advantages to a standard deviation (ddof = 1) of 1 (ScaleRL, arXiv:2510.13786).

    It is 1 if there is nothing to normalise: a single advantage, or all nearly equal.
    """
    if len(advantages) < 2:
        return 1.0
    std = float(np.std(advantages, ddof=1))
    return 1.0 / std if std > MIN_STD else 1.0


def step_returns(rewards: Sequence[np.ndarray], discount: float = 1.0) -> np.ndarray:
    """float64 [n, K]: Σ_{k ≥ t} discount^(k − t) · r_k for every member at every step t. 0 after a member's end.

    ``rewards``: those of each member, one per step.
    """
    returns_nK = np.zeros((len(rewards), max((len(member) for member in rewards), default=0)))
    for i, member in enumerate(rewards):
        returns_nK[i, : len(member)] = member
    for t in range(returns_nK.shape[1] - 2, -1, -1):
        returns_nK[:, t] += discount * returns_nK[:, t + 1]
    return returns_nK


def text_advantages(
    rewards: Sequence[np.ndarray], kind: str, kwargs: Mapping[str, Any] | None = None
) -> list[np.ndarray]:
    """Advantage of every text among the texts of the same step, so among the members that reached it.

    Args:
        rewards: of each member's texts, by step.
        kind, kwargs: as in ``group_advantages``.
    """
    advantages = [np.zeros(len(member)) for member in rewards]
    for t in range(max((len(member) for member in rewards), default=0)):
        reached = [i for i, member in enumerate(rewards) if len(member) > t]
        found = group_advantages(np.array([rewards[i][t] for i in reached], np.float64), kind, kwargs)
        for i, advantage in zip(reached, found, strict=True):
            advantages[i][t] = advantage
    return advantages
