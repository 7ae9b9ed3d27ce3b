"""What a bound on the lag does to the lengths that are trained: `python -m benchmarks.lag_drop --json FILE`.

A simulation of servers, actor, preprocessor and trainer with the project's pacing rule. It has no model: a rollout is a
length drawn at random, which decodes a token per unit of time. The loop is closed, so what is dropped also costs time.
The rules that are compared, all with the same bound:

    rollout   `preprocess.lag_drop=rollout`
    token     `preprocess.lag_drop=token`
    never     `preprocess.lag_drop=never`
    wait      not a rule of the project: a group is published only if all older ones can still be trained within the
              bound, so that trainer and younger groups wait for them. Nothing is dropped, and no token is older

For each: the share of the sampled tokens that is trained, by tenths of length; the time of the whole training; the
steps from the start of a rollout to its training; and held-out success of a policy that learns from it (`Learner`).
"""

import argparse
import heapq
import itertools
import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.actor.pacing import Pacing
from pipelinerl.plan.lengths import Lengths

MEAN, LONGEST, BOUND, READY_STEPS = 600, 8192, 8, 2
TOKENS_PER_STEP = 300
"""Tokens that a rollout decodes while the servers, all their slots busy, sample one optimizer batch."""
TRAINER_SPEED = 1.25
"""Tokens that the trainer trains while the servers, all their slots busy, sample one."""
GROUPS_PER_BATCH = 8
RULES = ("rollout", "token", "never", "wait")
SIZES = ((64, 1.2), (8, 0.8))
"""Attempts of a group, and standard deviation of the logarithm of lengths."""
DECILES = 10
CURVES = ("success", "success_longest_tenth")
"""Held-out success of each version."""


class Learner:
    """A policy of one logit for each stretch of ``STRETCH`` tokens: in each, a rollout decides right or wrong.

    A rollout succeeds with the share of its right decisions. What only long rollouts meet is learned from long ones
    alone, and a decision is made by the version that is live when the rollout gets there. The loss is the project's
    default: `reinforce` (ρ at most 5), `loo`, `sum_over_batch`, Adam.
    """

    STRETCH, FIRST_LOGIT, RATE, CLAMP = 256, -1.0, 0.05, 5.0

    def __init__(self, lengths: Lengths):
        self.decisions = -(-np.arange(1, lengths.longest + 1) // self.STRETCH)
        self.lengths = lengths
        self.versions = [np.full(self.decisions[-1], self.FIRST_LOGIT)]
        self._mean = np.zeros_like(self.versions[0])
        self._square = np.zeros_like(self.versions[0])

    def play(self, rng: np.random.Generator, group: "Group", version_times: np.ndarray) -> None:
        """Decide what the group's rollouts decided, and what they are worth."""
        number_n = self.decisions[group.lengths - 1]
        places_D = np.arange(number_n.max())
        version_D = np.searchsorted(version_times, group.began + places_D * self.STRETCH, side="right") - 1
        right_D = sigmoid(np.array([self.versions[v][d] for d, v in enumerate(version_D)]))
        group.right = rng.random((len(group.lengths), len(places_D))) < right_D
        group.logprobs = np.log(np.where(group.right, right_D, 1 - right_D))
        made = places_D < number_n[:, None]
        rewards_n = rng.random(len(number_n)) < (group.right & made).sum(1) / number_n
        group.advantages = rewards_n - (rewards_n.sum() - rewards_n) / (len(rewards_n) - 1)

    def train(self, batch: "list[Part]", batch_size: int) -> None:
        """One step on the kept part of each rollout."""
        policy = sigmoid(self.versions[-1])
        gradient = np.zeros_like(policy)
        for part in batch:
            group, chosen = part.group, part.chosen
            right = group.right[chosen]
            places_D = np.arange(right.shape[1])
            trained = (places_D < self.decisions[group.lengths[chosen] - 1][:, None]) & (
                places_D * self.STRETCH >= part.first_kept[:, None]
            )
            now_D = policy[: len(places_D)]
            logprobs = np.log(np.where(right, now_D, 1 - now_D))
            weights = np.minimum(np.exp(logprobs - group.logprobs[chosen]), self.CLAMP)
            terms = trained * weights * group.advantages[chosen][:, None] * (right - now_D)
            gradient[: len(places_D)] += terms.sum(0) / batch_size
        step = len(self.versions)
        self._mean = 0.9 * self._mean + 0.1 * gradient
        self._square = 0.95 * self._square + 0.05 * gradient**2
        scaled = (self._mean / (1 - 0.9**step)) / (np.sqrt(self._square / (1 - 0.95**step)) + 1e-8)
        self.versions.append(self.versions[-1] + self.RATE * scaled)

    def success_of_versions(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [V] twice: exact success of each version over all lengths, and over the longest tenth."""
        right_VD = sigmoid(np.array(self.versions))
        by_length_VL = (np.cumsum(right_VD, 1) / np.arange(1, right_VD.shape[1] + 1))[:, self.decisions - 1]
        shares_L = self.lengths.probabilities
        longest_L = np.clip(np.cumsum(shares_L) - (1 - 1 / DECILES), 0, shares_L)
        return by_length_VL @ shares_L, by_length_VL @ longest_L / longest_L.sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@dataclass(eq=False, kw_only=True)
class Group:
    """Rollouts of one problem. n attempts, D decisions of the longest."""

    began: float
    version: int
    """Live at the start: of its oldest tokens."""
    lengths: np.ndarray
    kept: np.ndarray
    """int64 [n]: tokens that were trained. −1: not decided yet."""
    lags: np.ndarray
    """int64 [n]: steps from the start to the training, −1 if it is not trained."""
    has_ended: bool = False
    decided: int = 0
    right: np.ndarray = field(default_factory=lambda: np.empty(0))
    """bool [n, D]"""
    logprobs: np.ndarray = field(default_factory=lambda: np.empty(0))
    """float64 [n, D]"""
    advantages: np.ndarray = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rollouts of a group that an optimizer batch holds: indices, and the first trained token of each."""

    group: Group
    chosen: np.ndarray
    first_kept: np.ndarray


class Simulation:
    """One training. ``run`` returns what it measured. Time in tokens of one rollout."""

    def __init__(self, rule: str, attempts: int, lengths: Lengths, steps: int, seed: int):
        self.rule, self.attempts, self.lengths, self.steps = rule, attempts, lengths, steps
        self.batch_size = GROUPS_PER_BATCH * attempts
        self.slots = round(self.batch_size * MEAN / TOKENS_PER_STEP)
        self.pacing = Pacing(batch_size=self.batch_size, max_lag_steps=BOUND, max_train_steps=10 * steps)
        self.rng = np.random.default_rng(seed)
        self.learner = Learner(lengths)
        self.now, self.free, self.dispatched, self.dropped = 0.0, self.slots, 0, 0
        self.version_times = [0.0]
        self.groups: list[Group] = []
        self.unpublished: list[Group] = []
        """Oldest first, the ended ones among them."""
        self.topic: deque[Group] = deque()
        self.batch: list[Part] = []
        self.packed: deque[list[Part]] = deque()
        self.packed_steps = 0
        self.is_training = False
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = itertools.count()

    @property
    def version(self) -> int:
        """The live one: the optimizer steps that are done."""
        return len(self.version_times) - 1

    def run(self) -> dict[str, Any]:
        while self.version < self.steps:
            self._start_groups()
            self._fill_batches()
            self._start_training()
            self.now, _, kind, what = heapq.heappop(self.events)
            getattr(self, kind)(what)
        return self._measured()

    def _after(self, wait: float, kind: str, what: Any) -> None:
        heapq.heappush(self.events, (self.now + wait, next(self.order), kind, what))

    def _start_groups(self) -> None:
        while self.free >= self.attempts:
            if not self.pacing.may_start(dispatched=self.dispatched, dropped=self.dropped, version=self.version):
                return
            lengths = self.lengths.sample(self.rng, self.attempts)
            unknown = np.full(self.attempts, -1)
            group = Group(began=self.now, version=self.version, lengths=lengths, kept=unknown, lags=unknown.copy())
            self.groups.append(group)
            self.unpublished.append(group)
            self.free -= self.attempts
            self.dispatched += self.attempts
            for length in lengths:
                self._after(float(length), "rollout_ended", None)
            self._after(float(lengths.max()), "group_ended", group)

    def rollout_ended(self, _: None) -> None:
        self.free += 1

    def group_ended(self, group: Group) -> None:
        self.learner.play(self.rng, group, np.array(self.version_times))
        group.has_ended = True
        for ended in [group for group in self.unpublished if group.has_ended]:
            if self.rule != "wait" or self._leaves_room(ended):
                self.unpublished.remove(ended)
                self.topic.append(ended)

    def _leaves_room(self, group: Group) -> bool:
        """Whether older groups can still be trained within the bound after this one."""
        samples = self.attempts * (len(self.groups) - len(self.unpublished) + 1)
        for older in self.unpublished:
            if older.version >= group.version:
                return True
            samples += self.attempts
            if samples > self.pacing.limit(older.version):
                return False
        return True

    def _fill_batches(self) -> None:
        """Take samples in the order of publication, until a full batch is too far ahead of the trainer."""
        while True:
            missing = self.batch_size - sum(len(part.chosen) for part in self.batch)
            if not missing:
                if self.packed_steps - self.version > READY_STEPS:
                    return
                self.packed.append(self.batch)
                self.packed_steps += 1
                self.batch = []
            elif self.topic:
                self._take(self.topic[0], missing)
            else:
                return

    def _take(self, group: Group, missing: int) -> None:
        """Decide about the group's next samples, until ``missing`` of them are in the batch."""
        rest = np.arange(group.decided, self.attempts)
        first_kept = np.zeros(len(rest), np.int64)
        oldest_allowed = self.packed_steps - BOUND
        if self.rule in ("rollout", "token") and group.version < oldest_allowed:
            old = np.inf if self.rule == "rollout" else np.ceil(self.version_times[oldest_allowed] - group.began)
            first_kept = np.minimum(old, group.lengths[rest]).astype(np.int64)
        young = first_kept < group.lengths[rest]
        taken = young & (np.cumsum(young) <= missing)
        count = len(rest) if taken.sum() < missing else int(np.flatnonzero(taken)[-1]) + 1
        rest, first_kept, taken = rest[:count], first_kept[:count], taken[:count]
        group.kept[rest] = group.lengths[rest] - first_kept
        group.lags[rest[taken]] = self.packed_steps - group.version
        self.dropped += int((~taken).sum())
        if taken.any():
            self.batch.append(Part(group=group, chosen=rest[taken], first_kept=first_kept[taken]))
        group.decided += count
        if group.decided == self.attempts:
            self.topic.popleft()

    def _start_training(self) -> None:
        if self.is_training or not self.packed:
            return
        self.is_training = True
        batch = self.packed.popleft()
        tokens = sum(int((part.group.lengths[part.chosen] - part.first_kept).sum()) for part in batch)
        self._after(tokens / (self.slots * TRAINER_SPEED), "step_ended", batch)

    def step_ended(self, batch: list[Part]) -> None:
        self.is_training = False
        self.learner.train(batch, self.batch_size)
        self.version_times.append(self.now)

    def _measured(self) -> dict[str, Any]:
        """Lengths and lags are of the groups that started after a tenth of the steps, up to the first undecided one."""
        last = next((i for i, group in enumerate(self.groups) if group.decided < self.attempts), len(self.groups))
        groups = [group for group in self.groups[:last] if group.version >= self.steps // 10]
        lengths = np.concatenate([group.lengths for group in groups])
        kept = np.concatenate([group.kept for group in groups])
        lags = np.concatenate([group.lags for group in groups])
        decile = np.argsort(np.argsort(lengths, kind="stable")) * DECILES // lengths.size
        shares = np.array([kept[decile == d].sum() / lengths[decile == d].sum() for d in range(DECILES)])
        starts = np.where(kept > 0, lengths - kept, lengths)
        success, of_longest = self.learner.success_of_versions()
        return {
            "rollouts": int(lengths.size),
            "tokens_kept": float(kept.sum() / lengths.sum()),
            "kept_by_length_decile": shares,
            "kept_over_mean": shares / shares.mean(),
            "trains_first_tenth": float((0.05 * lengths >= starts).mean()),
            "trains_last_tenth": float((0.95 * lengths >= starts).mean()),
            "rollout_lag_mean": float(lags[lags >= 0].mean()),
            "rollout_lag_max": int(lags.max()),
            "wall": self.now,
            "version_times": np.array(self.version_times),
            "success": success,
            "success_longest_tenth": of_longest,
        }


def summarised(runs: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, or [mean, standard error]. ``baseline``: the runs of rule `rollout`, of the same seeds."""
    pairs = list(zip(runs, baseline, strict=True))
    result: dict[str, Any] = {}
    for name in runs[0].keys() - {"version_times", *CURVES}:
        mean = np.mean([run[name] for run in runs], axis=0)
        result[name] = [round(float(x), 3) for x in mean] if mean.ndim else round(float(mean), 4)
    result["wall_over_rollout"] = with_error([run["wall"] / base["wall"] for run, base in pairs])
    for name in CURVES:
        result[name] = with_error([run[name][-1] for run in runs])
        result[f"{name}_minus_rollout"] = with_error([run[name][-1] - base[name][-1] for run, base in pairs])
        at_equal_time = [until(run, base, name) - until(base, run, name) for run, base in pairs]
        result[f"{name}_minus_rollout_at_equal_time"] = with_error(at_equal_time)
    return dict(sorted(result.items()))


def with_error(values: list[float]) -> list[float]:
    return [round(float(np.mean(values)), 4), round(float(np.std(values, ddof=1)) / len(values) ** 0.5, 4)]


def until(run: dict[str, Any], other: dict[str, Any], name: str) -> float:
    """Success of the version that was live in the first run when the first of both ended."""
    end = min(run["wall"], other["wall"])
    return float(run[name][np.searchsorted(run["version_times"], end, side="right") - 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a training")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    began = time.process_time()
    document: dict[str, Any] = {"bound": BOUND, "steps": arguments.steps, "seeds": arguments.seeds, "sizes": []}
    for attempts, sigma in SIZES:
        lengths = Lengths.lognormal(MEAN, LONGEST, sigma)
        runs = {
            rule: [Simulation(rule, attempts, lengths, arguments.steps, seed).run() for seed in range(arguments.seeds)]
            for rule in RULES
        }
        size: dict[str, Any] = {"attempts": attempts, "sigma": sigma}
        size |= {rule: summarised(of_rule, runs["rollout"]) for rule, of_rule in runs.items()}
        document["sizes"].append(size)
    document["cpu_s"] = round(time.process_time() - began, 1)
    text = json.dumps(document, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
