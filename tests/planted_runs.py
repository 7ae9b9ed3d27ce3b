"""A whole run of reinforcement learning in numpy, small enough for a test, in which failures can be planted.

The policy is a table: for every question (three numbers, of which the largest is asked) it has logits over the words
that it may say at each place, until it says END. Groups of attempts are sampled by a version that is some steps old,
REINFORCE with the leave-one-out advantage and Adam train it, and every step leaves the points and attempts that a real
run leaves. Nothing here knows the checks. A `Fault` changes one thing.
"""

import math
from bisect import bisect
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from pipelinerl.inspect.why.evidence import Attempt, Evidence
from pipelinerl.records import EvaluationDone, ProbeMissed, TrainerMessage
from tests.evidence import evidence

KINDS, WORDS, PLACES = 24, 12, 16
OPEN, END = 0, 1
"""A well-formed answer is OPEN, a number, END. Words from 2 on are numbers."""
GROUPS, ATTEMPTS, STEPS, LAG = 8, 8, 120, 1
WINDOW = 1024


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is other than in a healthy run."""

    learning_rate: float = 0.06
    sign: float = 1.0
    """Of the advantage."""
    reward: str = "task"
    """`task`: 1 for the right number, −1 for a broken form. Others pay for something else."""
    sharpen: float = 0.0
    """Added to every advantage in the loss."""
    form: float = 2.0
    """How far the first policy prefers the form, in nats."""
    asked: float = 1.0
    """Share of the question that reaches the policy. Below 1 it cannot tell questions apart."""
    is_end_trained: bool = True
    stale_from: int | None = None
    """Version from which on servers keep their weights."""
    judge_until: int | None = None
    """Version from which on no answer is judged."""
    right: str = "largest"
    """`largest`, `nothing` or `anything` is right."""
    unsayable: float = 0.0
    """Share of the groups whose reference is a number that the policy does not have."""
    are_tests_others: bool = False
    """Test problems have other answers than training problems."""
    longest: int = 6


@dataclass
class Run:
    """The run while it goes on."""

    fault: Fault
    random: Random
    attempts: list[Attempt] = field(default_factory=list)
    finetune: list[dict[str, Any]] = field(default_factory=list)
    actor: list[dict[str, Any]] = field(default_factory=list)
    preprocessor: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[EvaluationDone] = field(default_factory=list)
    messages: list[TrainerMessage] = field(default_factory=list)
    seen: deque = field(default_factory=lambda: deque(maxlen=WINDOW))
    solved: deque = field(default_factory=lambda: deque(maxlen=WINDOW // ATTEMPTS))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def first_policy(fault: Fault) -> np.ndarray:
    """[KINDS, PLACES, WORDS] logits."""
    logits = np.zeros((KINDS, PLACES, WORDS))
    logits[:, 0, OPEN] += fault.form + 1
    logits[:, 1, 2:] += fault.form
    logits[:, 2:, END] += fault.form + 1
    return logits


@dataclass
class Policy:
    """Chances [KINDS, PLACES, WORDS] of one version, and what sampling needs of them."""

    chances: np.ndarray

    def __post_init__(self) -> None:
        self.sums = self.chances.cumsum(-1).tolist()

    def sample(self, kind: int, longest: int, random: Random) -> tuple[list[int], list[float]]:
        words: list[int] = []
        logprobs: list[float] = []
        for place in range(longest):
            word = min(bisect(self.sums[kind][place], random.random()), WORDS - 1)
            words.append(word)
            logprobs.append(math.log(self.chances[kind, place, word]))
            if word == END:
                break
        return words, logprobs


def judge(words: list[int], right: int, version: int, run: Run) -> dict[str, float]:
    fault = run.fault
    formed = len(words) == 3 and words[0] == OPEN and words[1] > END and words[2] == END
    success = {"largest": formed and words[1] == right, "nothing": False, "anything": True}[fault.right]
    reward = 1.0 if success else 0.0 if formed or fault.right == "nothing" else -1.0
    if fault.reward == "negated":
        reward = -reward
    elif fault.reward == "large":
        reward = words[1] / WORDS if formed else -1.0
    elif fault.reward == "long":
        reward = float(success) + 0.4 * len(words)
    if fault.judge_until is not None and version >= fault.judge_until:
        success, reward = False, 0.0
    return {"reward": reward, "success": float(success), "no_answer": float(not formed)}


def play(fault: Fault, seed: int = 0) -> Evidence:
    """Trains for `STEPS` steps and returns what is on record."""
    run = Run(fault, Random(seed))
    answers = 2 + np.random.default_rng(seed).permutation(KINDS) % (WORDS - 2)
    logits = first_policy(fault)
    moments = np.zeros((2, *logits.shape))
    versions = deque([Policy(softmax(logits))] * (LAG + 1), maxlen=LAG + 1)
    evaluate(run, versions[-1], answers, 0)
    served = versions[0]
    for step in range(STEPS):
        if fault.stale_from is None or step < fault.stale_from:
            served = versions[0]
        gradient = train_step(run, logits, served, answers, step)
        moments[0] += 0.1 * (gradient - moments[0])
        moments[1] += 0.05 * (gradient**2 - moments[1])
        corrected = moments[0] / (1 - 0.9 ** (step + 1)), moments[1] / (1 - 0.95 ** (step + 1))
        logits += fault.learning_rate * min(1.0, (step + 1) / 10) * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
        versions.append(Policy(softmax(logits)))
        if step + 1 in (STEPS // 2, STEPS):
            evaluate(run, versions[-1], answers, step + 1)
    if fault.stale_from is not None:
        miss = ProbeMissed(
            server="actor_llm_0", version=fault.stale_from, since=0, is_final=True, reason="its tensors differ"
        )
        run.messages.append(miss)
    return evidence(
        finetune=run.finetune,
        actor=run.actor,
        preprocessor=run.preprocessor,
        messages=run.messages,
        evaluations=run.evaluations,
        attempts=run.attempts,
        answers=run.attempts,
        groups=GROUPS * STEPS,
    )


def train_step(run: Run, logits: np.ndarray, served: Policy, answers: np.ndarray, step: int) -> np.ndarray:
    """Samples a batch, records it, and returns the gradient of its gain."""
    fault, now = run.fault, softmax(logits)
    gradient, ratios, rewards = np.zeros_like(logits), [], []
    advantages_seen: list[float] = []
    for number in range(GROUPS):
        kind = run.random.randrange(KINDS)
        read = kind if fault.asked == 1 else 0
        played = [served.sample(read, fault.longest, run.random) for _ in range(ATTEMPTS)]
        reference = WORDS if fault.unsayable and run.random.random() < fault.unsayable else int(answers[kind])
        judged = [judge(words, reference, step, run) for words, _ in played]
        own = np.array([metrics["reward"] for metrics in judged])
        advantages = fault.sign * (own - own.mean()) * ATTEMPTS / (ATTEMPTS - 1)
        advantages_seen += advantages.tolist()
        rewards += own.tolist()
        run.solved.append(np.mean([metrics["success"] for metrics in judged]))
        for (words, logprobs), metrics, advantage in zip(played, judged, advantages, strict=True):
            trained = len(words) if fault.is_end_trained else max(len(words) - 1, 1)
            moved = [math.log(now[read, place, words[place]]) - logprobs[place] for place in range(trained)]
            ratios += moved
            for place in range(trained):
                direction = -now[read, place]
                direction[words[place]] += 1
                weight = min(math.exp(moved[place]), 5.0)
                gradient[read, place] += (advantage + fault.sharpen) * weight * direction
            run.seen.append((metrics, len(words), words[-1] != END))
            run.attempts.append(
                Attempt(
                    group=f"0-{step * GROUPS + number}",
                    version=max(step - LAG, 0),
                    reward=metrics["reward"],
                    success=metrics["success"],
                    answer=bytes(words),
                    tokens=len(words),
                    certainty=float(np.mean(logprobs)),
                    asked=fault.asked,
                    is_end_trained=(trained == len(words)) if words[-1] == END else None,
                    advantage=float(advantage),
                    moved=float(np.mean(moved)),
                )
            )
    record(run, step, now, np.array(ratios), np.array(rewards), np.array(advantages_seen))
    return gradient / (GROUPS * ATTEMPTS)


def record(
    run: Run, step: int, now: np.ndarray, ratios: np.ndarray, rewards: np.ndarray, advantages: np.ndarray
) -> None:
    entropy = float(-(now * np.log(now)).sum(-1)[:, :3].mean())
    weights = np.exp(np.clip(ratios, -30, 30))
    finetune = {"entropy": entropy, "reward": float(rewards.mean()), "lag_mean": float(LAG)}
    finetune |= {"logratio_abs_mean": float(np.abs(ratios).mean()), "clip_fraction": float((weights > 5).mean())}
    finetune["ess"] = float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
    stale = run.fault.stale_from
    finetune["live_version"] = float(step if stale is None else min(step, stale))
    run.finetune.append({"step": step + 1, "time": float(step)} | finetune)
    run.preprocessor.append({"step": step, "time": float(step), "advantage_std": float(advantages.std())})
    if step % 3 == 2:
        metrics, lengths, cut = zip(*run.seen, strict=True)
        actor = {name: float(np.mean([one[name] for one in metrics])) for name in metrics[0]}
        actor |= {"output_tokens": float(np.mean(lengths)), "cut_by_length": float(np.mean(cut))}
        actor["groups_always_solved"] = float(np.mean([share == 1 for share in run.solved]))
        actor["groups_never_solved"] = float(np.mean([share == 0 for share in run.solved]))
        actor["rollouts"] = GROUPS * ATTEMPTS * (step + 1)
        run.actor.append({"step": step, "time": float(step)} | actor)


def evaluate(run: Run, policy: Policy, answers: np.ndarray, version: int) -> None:
    results = []
    for number in range(512):
        kind = number % KINDS
        words, _ = policy.sample(kind if run.fault.asked == 1 else 0, run.fault.longest, run.random)
        right = int(answers[kind]) + 1 if run.fault.are_tests_others else int(answers[kind])
        results.append(judge(words, right, version, run))
    success = float(np.mean([result["success"] for result in results]))
    reward = float(np.mean([result["reward"] for result in results]))
    run.evaluations.append(
        EvaluationDone(version=version, success=success, reward=reward, num_rollouts=512, metrics={})
    )


FAULTS = {
    "wrong sign": Fault(sign=-1.0),
    "reward hack": Fault(reward="large"),
    "learning rate too high": Fault(learning_rate=1.8),
    "end of answers not trained": Fault(is_end_trained=False),
    "stale server": Fault(stale_from=20),
    "too hard": Fault(right="nothing"),
    "too easy": Fault(right="anything"),
    "length explosion": Fault(reward="long", longest=PLACES),
    "entropy collapse": Fault(sharpen=10.0, learning_rate=0.6),
    "bad tokenizer": Fault(form=-4.0),
    "truncated prompts": Fault(asked=0.6),
    "judge down": Fault(judge_until=60),
    "success in training alone": Fault(are_tests_others=True),
}
"""By the cause that should come first."""
