"""Whether branches tell which of an agent's turns earned the reward: a simulation in which the truth is known.

A *branch* replays the first turns of a rollout and samples the rest anew. The mean return of a state's branches is its
value, and V(after) − V(before) is the advantage of the turns between two states with branches. The policy of the
simulation makes one choice a turn, right or not, so its advantages can be computed.

Two questions. How do estimated advantages of all sampled turns correlate with the true ones, where one of twelve turns
decides? And how many sampled turns does a gradient of equal quality cost, where branches are trained and paid for like
rollouts?

A gradient's noise over its square, in turns, is what a batch needs (the noise scale of arXiv:1812.06162, eq. 2.8): half
of it means half the sampled tokens, where noise limits a run. What favours branches here: an environment that repeats
exactly, no lag, and a repeated turn costs nothing.

    python -m benchmarks.branches --json benchmarks/branches.json
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from benchmarks.provenance import commit
from pipelinerl.preprocess.advantages import leave_one_out

# P paths: rollouts and branches. T turns. K states with branches. n branches of each.
ATTEMPTS, STATES, BRANCHES = 8, 2, 4
EASY = 0.95
"""Probability of the other tokens of a turn, whose surprise means nothing."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """States are int [P, …], one row per path."""

    turns: int = 12
    tokens: int = 16
    """Of a turn. One is the choice."""

    def first(self, rng: Generator, P: int) -> np.ndarray:
        raise NotImplementedError

    def after(self, rng: Generator, states_P: np.ndarray, turn: int, right_P: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def over(self, states_P: np.ndarray) -> np.ndarray:
        return np.zeros(len(states_P), bool)

    def reward(self, rng: Generator, states_P: np.ndarray, turns_P: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def values(self, states: np.ndarray, p_T: np.ndarray) -> np.ndarray | None:
        """V [P, T + 1] of the states of paths. None: not computed."""
        return None


@dataclass(frozen=True, kw_only=True)
class Decisive(Task):
    """Right at turn ``turn`` is a success, but for ``noise``. No other turn counts."""

    turn: int
    noise: float = 0.0

    def first(self, rng: Generator, P: int) -> np.ndarray:
        return np.full((P, 1), -1)

    def after(self, rng: Generator, states_P: np.ndarray, turn: int, right_P: np.ndarray) -> np.ndarray:
        return np.where(turn == self.turn, right_P[:, None], states_P)

    def reward(self, rng: Generator, states_P: np.ndarray, turns_P: np.ndarray) -> np.ndarray:
        return (rng.random(len(states_P)) < self.noise + (1 - 2 * self.noise) * states_P[:, 0]).astype(float)

    def values(self, states: np.ndarray, p_T: np.ndarray) -> np.ndarray:
        right = np.where(states[..., 0] < 0, p_T[self.turn], states[..., 0])
        return self.noise + (1 - 2 * self.noise) * right


@dataclass(frozen=True, kw_only=True)
class Chain(Task):
    """Every turn must be right. The first wrong one is not noticed."""

    def first(self, rng: Generator, P: int) -> np.ndarray:
        return np.ones((P, 1), int)

    def after(self, rng: Generator, states_P: np.ndarray, turn: int, right_P: np.ndarray) -> np.ndarray:
        return states_P * right_P[:, None]

    def reward(self, rng: Generator, states_P: np.ndarray, turns_P: np.ndarray) -> np.ndarray:
        return states_P[:, 0].astype(float)

    def values(self, states: np.ndarray, p_T: np.ndarray) -> np.ndarray:
        return states[..., 0] * np.append(np.cumprod(p_T[::-1])[::-1], 1.0)


@dataclass(frozen=True, kw_only=True)
class Guessing(Task):
    """The game of `domains/guessing`, 1 … 128 in eight turns. Right: the middle of what is left. Wrong: any of it."""

    turns: int = 8

    def first(self, rng: Generator, P: int) -> np.ndarray:
        return np.tile([1, 128, rng.integers(1, 129), 0], (P, 1))  # all attempts at one hidden number

    def after(self, rng: Generator, states_P: np.ndarray, turn: int, right_P: np.ndarray) -> np.ndarray:
        low, high, hidden, _ = states_P.T
        guess = np.where(right_P, (low + high) // 2, rng.integers(low, high + 1))
        low, high = np.where(guess < hidden, guess + 1, low), np.where(guess > hidden, guess - 1, high)
        return np.stack((low, high, hidden, guess == hidden), 1)

    def over(self, states_P: np.ndarray) -> np.ndarray:
        return states_P[:, 3] == 1

    def reward(self, rng: Generator, states_P: np.ndarray, turns_P: np.ndarray) -> np.ndarray:
        return np.where(self.over(states_P), 2 - (turns_P - 1) / 10, 0.0)


class Paths(NamedTuple):
    """Rollouts of one problem, and their branches behind them."""

    states: np.ndarray
    """int [P, T + 1, …]: before each turn and after the last one."""
    right_PT: np.ndarray
    played_PT: np.ndarray
    """Whether the turn took place."""
    returns_P: np.ndarray
    parent_P: np.ndarray
    """The rollout of which a branch repeats the beginning. A rollout's own index."""
    first_P: np.ndarray
    """The first turn that the path sampled itself."""

    @property
    def own_PT(self) -> np.ndarray:
        return self.played_PT & (np.arange(self.right_PT.shape[1]) >= self.first_P[:, None])


def play(
    task: Task, rng: Generator, p_T: np.ndarray, begun: Paths | None, parent_P: np.ndarray, first_P: np.ndarray
) -> Paths:
    """Samples paths from their first own turns on. ``begun``: the rollouts that branches repeat."""
    P, T = len(parent_P), task.turns
    right_PT = rng.random((P, T)) < p_T
    states = [task.first(rng, P) if begun is None else begun.states[parent_P, 0]]
    played_PT = np.zeros((P, T), bool)
    for turn in range(T):
        now, repeats = states[-1], turn < first_P
        played_PT[:, turn] = ~task.over(now)
        later = np.where(played_PT[:, turn, None], task.after(rng, now, turn, right_PT[:, turn]), now)
        if begun is not None:
            right_PT[repeats, turn] = begun.right_PT[parent_P[repeats], turn]
            later[repeats] = begun.states[parent_P[repeats], turn + 1]
            played_PT[repeats, turn] = True
        states.append(later)
    returns_P = task.reward(rng, states[-1], played_PT.sum(1))
    return Paths(np.stack(states, 1), right_PT, played_PT, returns_P, parent_P, first_P)


def sampled(task: Task, rng: Generator, p_T: np.ndarray, method: "Method") -> Paths:
    """A group, with its branches."""
    rollouts = play(task, rng, p_T, None, np.arange(ATTEMPTS), np.zeros(ATTEMPTS, int))
    if method.choose is None:
        return rollouts
    cuts = [(i, cut) for i, found in enumerate(method.choose(task, rng, p_T, rollouts)) for cut in found]
    parent_P, first_P = (np.repeat([pair[side] for pair in cuts], method.branches).astype(int) for side in (0, 1))
    anew = play(task, rng, p_T, rollouts, parent_P, first_P)
    return Paths(*(np.concatenate(pair) for pair in zip(rollouts, anew, strict=True)))


Chooser = Callable[[Task, Generator, np.ndarray, Paths], list[list[int]]]
"""Returns the turns of each rollout before which it branches. Turn 0 needs no branches: the group is its branches."""


def at_random(task: Task, rng: Generator, p_T: np.ndarray, rollouts: Paths) -> list[list[int]]:
    return _best(rng.random(rollouts.right_PT.shape), rollouts)


def by_surprise(task: Task, rng: Generator, p_T: np.ndarray, rollouts: Paths) -> list[list[int]]:
    """Before the turns with the largest mean −log μ of their tokens."""
    return _best(_surprise(task, rng, p_T, rollouts), rollouts)


def around_surprise(task: Task, rng: Generator, p_T: np.ndarray, rollouts: Paths) -> list[list[int]]:
    """Before and after the turn with the largest mean −log μ."""
    return [_around(int(turn), task) for turn in _surprise(task, rng, p_T, rollouts).argmax(1)]


def around_surprise_of_group(task: Task, rng: Generator, p_T: np.ndarray, rollouts: Paths) -> list[list[int]]:
    """Likewise, with the surprise of turns of equal number averaged over the group."""
    return [_around(int(_surprise(task, rng, p_T, rollouts).mean(0).argmax()), task)] * ATTEMPTS


def around_the_decisive(task: Task, rng: Generator, p_T: np.ndarray, rollouts: Paths) -> list[list[int]]:
    """An oracle."""
    assert isinstance(task, Decisive)
    return [_around(task.turn, task)] * ATTEMPTS


def everywhere(task: Task, rng: Generator, p_T: np.ndarray, rollouts: Paths) -> list[list[int]]:
    return [list(range(1, task.turns))] * ATTEMPTS


def _around(turn: int, task: Task) -> list[int]:
    return [cut for cut in (turn, turn + 1) if 0 < cut < task.turns]


def _best(scores_PT: np.ndarray, rollouts: Paths) -> list[list[int]]:
    can_PT = rollouts.played_PT.copy()
    can_PT[:, 0] = False
    order_PT = np.argsort(np.where(can_PT, -scores_PT, np.inf), axis=1)
    return [sorted(int(t) for t in order[:STATES] if can[t]) for order, can in zip(order_PT, can_PT, strict=True)]


def _surprise(task: Task, rng: Generator, p_T: np.ndarray, rollouts: Paths) -> np.ndarray:
    choice_PT = -np.log(np.where(rollouts.right_PT, p_T, 1 - p_T))
    rare_PT = rng.binomial(task.tokens - 1, 1 - EASY, choice_PT.shape)
    surprise_PT = (choice_PT - rare_PT * np.log(1 - EASY) - (task.tokens - 1 - rare_PT) * np.log(EASY)) / task.tokens
    return np.where(rollouts.played_PT, surprise_PT, 0.0)


Estimator = Callable[[Paths, np.ndarray | None], np.ndarray]
"""Advantages of all turns [P, T] of paths whose states have values [P, T + 1], where they are known."""


def group(paths: Paths, values: np.ndarray | None) -> np.ndarray:
    return np.repeat(leave_one_out(paths.returns_P)[:, None], paths.right_PT.shape[1], 1)


def truth(paths: Paths, values: np.ndarray | None) -> np.ndarray:
    assert values is not None
    return np.diff(values, axis=1)


def branches(paths: Paths, values: np.ndarray | None) -> np.ndarray:
    """V(after) − V(before), where each turn's states are the nearest ones with branches, the first, and the last.

    Values shrink towards the group's by empirical Bayes for unequal variances (Efron & Morris, JASA 70:311, 1975;
    τ² by DerSimonian & Laird, 1986). A baseline never contains the return of the path that it is subtracted from.
    ``values``: take these for the states with branches instead.
    """
    returns_P, first_P, parent_P = paths.returns_P, paths.first_P, paths.parent_P
    T = paths.right_PT.shape[1]
    members = np.flatnonzero(first_P == 0)
    mean = returns_P[members].mean()
    base_m = mean - (returns_P[members] - mean) / (len(members) - 1)  # mean of the others
    states = sorted({(int(parent_P[j]), int(first_P[j])) for j in np.flatnonzero(first_P)})
    if not states:
        return group(paths, values)
    rows = [np.flatnonzero((parent_P == i) & (first_P == cut)) for i, cut in states]
    found_Kn = np.array([returns_P[row] for row in rows])
    known = None if values is None else np.array([values[i, cut] for i, cut in states])
    centre_K = base_m[[i for i, _ in states]]
    with_own_Kn = np.column_stack((found_Kn, returns_P[[i for i, _ in states]]))
    before_K, kept_K = shrunk(found_Kn, centre_K)
    after_K, _ = shrunk(with_own_Kn, centre_K)
    if known is not None:
        before_K, after_K = known, known
    estimated_PT = np.zeros((len(returns_P), T))
    for i in members:
        cut_at = [k for k, (parent, _) in enumerate(states) if parent == i]
        edges = [0, *(states[k][1] for k in cut_at), T]
        starts, ends = [base_m[i], *before_K[cut_at]], [*after_K[cut_at], returns_P[i]]
        for begin, end, low, high in zip(edges[:-1], edges[1:], starts, ends, strict=True):
            estimated_PT[i, begin:end] = high - low
    for k, row in enumerate(rows):
        others_n = (with_own_Kn[k].sum() - found_Kn[k]) / found_Kn.shape[1]
        value_n = centre_K[k] + kept_K[k] * (others_n - centre_K[k]) if known is None else known[k]
        estimated_PT[row] = (found_Kn[k] - value_n)[:, None]
    return estimated_PT


def shrunk(found_Kn: np.ndarray, centre_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns values [K], and the share of each state's distance from the group that is kept, [K]."""
    n, mean_K = found_Kn.shape[1], found_Kn.mean(1)
    within_K = found_Kn.var(1, ddof=1)
    noise_K = ((n - 1) * within_K + within_K.mean()) / n / n  # a state's variance, with one sample's worth of all
    between = max(0.0, float(((mean_K - centre_K) ** 2).mean() - noise_K.mean()))
    kept_K = between / np.maximum(between + noise_K, 1e-12)
    return centre_K + kept_K * (mean_K - centre_K), kept_K


def prediction(paths: Paths, values: np.ndarray | None) -> np.ndarray:
    """The best linear prediction of each turn's part in the return (Henderson, Biometrics 31:423, 1975).

    Returns of two paths that share k turns have covariance Q(k), estimated by isotonic regression of the products of
    pairs. It needs turns of equal number to be alike in all rollouts of a group.
    """
    returns_P, P, T = paths.returns_P, len(paths.returns_P), paths.right_PT.shape[1]
    own_P = np.where(paths.first_P == 0, T, paths.first_P)
    shared_PP = np.where(paths.parent_P[:, None] == paths.parent_P, np.minimum(own_P[:, None], own_P), 0)
    np.fill_diagonal(shared_PP, T)
    rest_P = returns_P - returns_P[paths.first_P == 0].mean()
    depths = np.unique(shared_PP[shared_PP > 0])
    products_PP = np.outer(rest_P, rest_P)
    levels = isotonic([(products_PP[shared_PP == k].mean(), int((shared_PP == k).sum())) for k in depths])
    covariance = np.interp(np.arange(T + 1), [0, *depths], [0, *np.maximum(levels, 0)])
    ridge = max(1e-3 * covariance[-1], 1e-9) * np.eye(P)  # rounding: branches may have equal rows
    inverse_PP = np.linalg.inv(covariance[shared_PP] + ridge)
    level = (inverse_PP @ returns_P).sum() / inverse_PP.sum()
    pull_P = inverse_PP @ (returns_P - level)
    return np.stack([step * ((shared_PP > t) @ pull_P) for t, step in enumerate(np.diff(covariance))], 1)


def isotonic(levels: list[tuple[float, int]]) -> np.ndarray:
    """Pools adjacent violators: the closest rising sequence to (value, weight) pairs."""
    pooled: list[tuple[float, int, int]] = []
    for value, weight in levels:
        pooled.append((value, weight, 1))
        while len(pooled) > 1 and pooled[-2][0] > pooled[-1][0]:
            (a, u, i), (b, v, j) = pooled.pop(), pooled.pop()
            pooled.append(((a * u + b * v) / (u + v), u + v, i + j))
    return np.repeat([value for value, _, _ in pooled], [count for _, _, count in pooled])


class Method(NamedTuple):
    """Where to branch, and what becomes of the returns."""

    estimate: Estimator
    choose: Chooser | None = None
    branches: int = BRANCHES
    known: bool = False
    """Whether the estimate is given the true values of the states with branches."""


METHODS = {
    "group": Method(group),
    "true advantages of a group": Method(truth, known=True),
    "random states": Method(branches, at_random),
    "random states, values known": Method(branches, at_random, known=True),
    "random states, prediction": Method(prediction, at_random),
    "surprising turns": Method(branches, by_surprise),
    "around the most surprising turn": Method(branches, around_surprise),
    "around it, values known": Method(branches, around_surprise, known=True),
    "around the group's most surprising turn": Method(branches, around_surprise_of_group),
    "around the group's, prediction": Method(prediction, around_surprise_of_group),
    "around the decisive turn": Method(branches, around_the_decisive),
    "around the decisive turn, prediction": Method(prediction, around_the_decisive),
    "every state, 16 branches": Method(branches, everywhere, branches=16),
}
PLANTS = {
    "all turns alike": (0.5, 0.0, 16),
    "others sure": (0.95, 0.0, 16),
    "others sure, one token a turn": (0.95, 0.0, 1),
    "others sure, one token a turn, noise .1": (0.95, 0.1, 1),
}
"""Probability of the right choice at turns that do not count, noise of the reward, tokens of a turn."""
LEARNT: dict[str, tuple[Task, float, float]] = {
    "decisive, others .5": (Decisive(turn=6), 0.5, 0.5),
    "decisive, others .95": (Decisive(turn=6, tokens=1), 0.5, 0.95),
    "chain .8": (Chain(), 0.8, 0.8),
    "chain .95": (Chain(), 0.95, 0.95),
    "guessing .3": (Guessing(), 0.3, 0.3),
    "guessing .6": (Guessing(), 0.6, 0.6),
}
"""Task, probability of the right choice at turn 6, and at the others."""


def correlation(
    method: Method, num_groups: int, num_turns: int, others: float, noise: float, tokens: int
) -> dict[str, Any]:
    """Of estimated with true advantages, where the decisive turn is right with .5.

    Ends after ``num_groups`` groups or ``num_turns`` sampled turns.
    """
    rng = np.random.default_rng(0)
    estimated, true, of_rollouts, turns = [], [], [], 0
    for g in range(num_groups):
        task = Decisive(turn=g % 12, noise=noise, tokens=tokens)
        p_T = np.full(task.turns, others)
        p_T[task.turn] = 0.5
        paths = sampled(task, rng, p_T, method)
        values, own_PT = task.values(paths.states, p_T), paths.own_PT
        estimated.append(method.estimate(paths, values if method.known else None)[own_PT])
        true.append(np.diff(values, axis=1)[own_PT])
        of_rollouts.append(np.repeat(paths.first_P == 0, own_PT.sum(1)))
        turns += int(own_PT.sum())
        if turns > num_turns and not (g + 1) % task.turns:
            break
    e, t, of_rollout = (np.concatenate(parts) for parts in (estimated, true, of_rollouts))
    return {
        "all turns": round(float(np.corrcoef(e, t)[0, 1]), 3),
        "rollouts alone": round(float(np.corrcoef(e[of_rollout], t[of_rollout])[0, 1]), 3),
        "turns per group": round(turns / len(true)),
    }


def gradients(method: Method, task: Task, p_T: np.ndarray, num_groups: int, seed: int) -> tuple[np.ndarray, float]:
    """Returns the gradients of groups by the logits of the choices [G, T], and the turns that a group samples."""
    rng = np.random.default_rng(seed)
    gradients_GT, turns = np.zeros((num_groups, task.turns)), 0
    for g in range(num_groups):
        paths = sampled(task, rng, p_T, method)
        own_PT, values = paths.own_PT, task.values(paths.states, p_T) if method.known else None
        gradients_GT[g] = (own_PT * method.estimate(paths, values) * (paths.right_PT - p_T)).sum(0)
        turns += int(own_PT.sum())
    return gradients_GT, turns / num_groups


def turns_needed(gradients_GT: np.ndarray, turns: float, true_T: np.ndarray) -> tuple[float, float]:
    """Returns the turns of which the gradient's part along the true one is as large as its noise, and their error."""
    along_G = gradients_GT @ true_T / np.linalg.norm(true_T)
    needed = turns * gradients_GT.var(0, ddof=1).sum() / along_G.mean() ** 2
    error = 2 * along_G.std(ddof=1) / np.sqrt(len(along_G)) / abs(along_G.mean())
    return float(needed), float(needed * error)


def measure(num_groups: int) -> dict[str, Any]:
    result: dict[str, Any] = {"commit": commit(), "correlation": {}, "turns needed over the group's": {}}
    for plant, settings in PLANTS.items():
        rows = {
            name: correlation(method, num_groups, 500 * num_groups, *settings)
            for name, method in METHODS.items()
            if method.estimate is not truth
        }
        result["correlation"][plant] = rows
        print(plant, json.dumps(rows), flush=True)
    for label, (task, decisive, others) in LEARNT.items():
        p_T = np.full(task.turns, others)
        p_T[6] = decisive
        plain = gradients(METHODS["group"], task, p_T, 10 * num_groups, seed=1)
        true_T = plain[0].mean(0)
        row = {}
        for name, method in METHODS.items():
            if method.estimate is group or method.choose is everywhere:
                continue
            if not isinstance(task, Decisive) and method.choose is around_the_decisive:
                continue
            if isinstance(task, Guessing) and method.known:
                continue
            found = gradients(method, task, p_T, num_groups, seed=2)
            needed, error = (value / turns_needed(*plain, true_T)[0] for value in turns_needed(*found, true_T))
            row[name] = f"{needed:.2f} ± {error:.2f}" if needed > 1e-9 else "0"
        result["turns needed over the group's"][label] = row
        print(label, row, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--groups", type=int, default=1200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args.groups)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
