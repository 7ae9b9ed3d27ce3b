"""Why a run does not learn: from what is on record to its causes, the most likely first. Pure.

A cause is an alarm with a level and a command that shows its evidence. Levels are in the order in which a rollout meets
them: what fails earlier explains what fails later, so a fault of the data stands before the policy that it spoils. On
one level the earlier one stands first. `CHECKS` looks at single attempts, which say more than curves do: what of the
question reached the model, what the reward pays for, which tokens are trained, where training moved them. The rest
are the alarms of `inspect.alarms`.
"""

import dataclasses
import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise

from pipelinerl.inspect.alarms import (
    FEWEST_POINTS,
    LOW_ESS,
    SIGNAL,
    SOLVED,
    Alarm,
    History,
    alarms,
    given,
    success_shift,
)
from pipelinerl.inspect.curves import CERTAIN, ends_of, noise_of, shift_of, wilson
from pipelinerl.observability.catalogue import STEP, ActorMetric, TrainerMetric
from pipelinerl.observability.metrics import Point, Points

MOST = 0.5
"""Share of the attempts beyond which a fault is that of the run."""
FEWEST_ATTEMPTS = 32
SAME_FORM = 0.5
"""Largest change of length and of certainty, relative, between answers that count as the same."""
TOO_FAR = math.sqrt(2 * math.log(1 / LOW_ESS) / math.pi)
"""Mean size of the log-ratio of a token per step of its lag, in nats. One step then leaves `LOW_ESS` of the tokens
effective: normal log-ratios of deviation σ leave exp(−σ²), and their mean size is σ √(2/π).
A size of effect: a rate that is too high is so from the first step on, and leaves no quiet part to compare with."""
TOO_MUCH = 1 / FEWEST_POINTS
"""Lasting change of the entropy by one step, relative to the first entropy: the first policy is gone in fewer steps
than a curve needs. A size of effect: learning changes the entropy beyond noise, too."""
UNCHANGED = 0.1
"""Change of a server's log-probabilities over many versions, relative to the trainer's distance from the server.
A size of effect: a server that kept its weights repeats its numbers, whatever the run's noise, and a healthy one moves
further than the trainer. The tenth leaves room for evaluated tokens, which are more certain than sampled ones."""
MANY_EQUAL = 4
"""Attempts at one problem that are all equal: the policy is sure."""
UNMOVED = 1e-4
"""The same in a run whose weights do not change what the policy says."""


class Level(IntEnum):
    """What failed, in the order in which a rollout meets it."""

    DELIVERY = 0
    """The servers or the domain: what the policy is asked, with which weights, and who judges it."""
    REWARD = 1
    """What is paid for."""
    TASK = 2
    """The problems teach nothing."""
    STEP = 3
    """The optimizer's steps."""
    SYMPTOM = 4
    """What the policy became."""
    OUTCOME = 5
    """What came of it, whatever the cause."""


LEVELS = {
    "stale server": Level.DELIVERY,
    "calibration": Level.DELIVERY,
    "server out of service": Level.DELIVERY,
    "stalled version": Level.DELIVERY,
    "bad tokenizer": Level.DELIVERY,
    "reward hack": Level.REWARD,
    "mismatch": Level.STEP,
    "clip fraction": Level.STEP,
    "flat evaluation": Level.OUTCOME,
    "falling evaluation": Level.OUTCOME,
    "groups never solved": Level.OUTCOME,
    "groups always solved": Level.OUTCOME,
    "all-zero advantages": Level.OUTCOME,
}
"""Of alarms, by name. Any other is a symptom."""
GIVEN_UP = {
    "verifier": ("judge down", "verifier_*/log.txt and actor_*/log.txt name the judge's error"),
    "domain_error": ("domain fails", "event=rollout_failed in actor_*/log.txt has the exception and its line: mend it"),
    "empty": (
        "nothing to train",
        "The domain returns no sampled token to train on: return the texts of its calls, with fewer labels of -100",
    ),
    "transport": ("servers fail", "Read actor_llm_*/log.txt: requests got no answer, or an error"),
    "weights": ("servers fail", "Read actor_llm_*/log.txt and finetune_0/log.txt: weights were not as announced"),
    "timeout": (
        "rollouts time out",
        "Raise actor.rollout_timeout_s, or find what takes so long: answers, tools or the judge",
    ),
    "too_long": (
        "sequences too long",
        "Raise finetune.seq_length and max_model_len, or lower llm.parameters.max_tokens or the prompts' length",
    ),
    "too_large": ("groups too large", "actor_*/log.txt has the limit: return fewer or shorter texts and images"),
    "poisonous": ("workers die", "actor_*/log.txt has the exit code: look for crashes of libraries and for memory"),
}
"""Reason for which the actor gave up most groups (`actor.failures.REASONS`) → name of the cause, and cure."""
COMMANDS = {
    "stale server": "pipelinerl status {run}",
    "calibration": "pipelinerl status {run}",
    "server out of service": "pipelinerl status {run}",
    "stalled version": "pipelinerl status {run}",
    "bad tokenizer": "pipelinerl rollouts {run} --worst 5",
    "reward hack": "pipelinerl rollouts {run} --best 20",
    "mismatch": "pipelinerl replay {run} --step {step} --mismatch",
    "length explosion": "pipelinerl rollouts {run} --last 5",
    "entropy collapse": "pipelinerl rollouts {run} --last 16",
}
"""What shows the evidence of an alarm. Of any other, the report."""
REPORT = "pipelinerl report {run}"


@dataclass(frozen=True, kw_only=True)
class Cause(Alarm):
    """Something that keeps the run from learning."""

    level: Level
    command: str = REPORT
    """What shows the evidence, with `{run}` and `{step}` to be filled in."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is on record about one training rollout."""

    group: str
    version: int
    """Oldest weight version that sampled a token of it."""
    reward: float
    success: float | None = None
    is_error: bool = False
    """The domain says that it failed, although it read an answer."""
    answer: bytes | None = None
    """Digest of all its tokens, of the prompt and of tools, too. Equal ones are the same answer to the same problem.
    Known in `Evidence.answers` alone."""
    tokens: int = 1
    """Sampled."""
    is_cut: bool = False
    """The server ended an answer for its length."""
    is_full: bool = False
    """It did so because the context was full, prompt and all."""
    certainty: float = 0.0
    """Mean log-probability of its tokens when they were sampled."""
    asked: float | None = None
    """Share of the problem's text that the prompt holds, from its beginning or to its end, 0 for next to nothing.

    None: the problem has no text that is long enough."""
    is_end_trained: bool | None = None
    """Whether the token that ended the answer is trained. None: the answer did not end by itself."""
    goes_on: bool = False
    """Tokens were sampled after the one that ends an answer."""
    advantage: float | None = None
    moved: float | None = None
    """Mean change of its tokens' log-probability from the sampler to the trainer. None: not on record, or no lag."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far servers moved from one weight version to another, by equal tokens in equal contexts."""

    first: int
    last: int
    contexts: int
    change: float
    """Mean change of the servers' log-probability in nats."""
    apart: float
    """Mean distance of the trainer from the sampler between the versions, on tokens of the same places in answers."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a run."""

    history: History
    attempts: Sequence[Attempt] = ()
    """Some of every step, in the order of their versions."""
    answers: Sequence[Attempt] = ()
    """All on record, in the same order: what they said and earned, and nothing else of them."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason → groups that the actor gave up."""
    groups: int = 0
    """Groups that the actor published."""
    drifts: Sequence[Drift] = ()
    """Between the evaluated versions, in order."""


def causes(evidence: Evidence) -> list[Cause]:
    """Return the causes, the most likely first. Empty for a run in which nothing looks wrong."""
    found = [cause for check in CHECKS for cause in check(evidence)]
    named = {cause.name for cause in found}
    found += [
        as_cause(alarm, evidence, named)
        for alarm in alarms(evidence.history)
        if not alarm.is_about_speed and alarm.name not in named
    ]
    return sorted(found, key=lambda cause: (cause.level, -1 if cause.step is None else cause.step))


def as_cause(alarm: Alarm, evidence: Evidence, named: Collection[str]) -> Cause:
    """The alarm as a cause. ``named``: causes that the attempts show."""
    level, command = LEVELS.get(alarm.name, Level.SYMPTOM), COMMANDS.get(alarm.name, REPORT)
    if alarm.name == "entropy collapse" and "confident failures" in named:
        cure = f"If the answers of the confident failures below are right, mend their references. Else: {alarm.cure}"
        alarm = dataclasses.replace(alarm, cure=cure)
    if alarm.name == "reward hack" and not failures_pay(evidence.attempts):
        level = Level.SYMPTOM  # what is paid beside success, as a form, is learned
    return Cause(**vars(alarm), level=level, command=command)


def learns(history: History) -> bool:
    """Whether success rose: in evaluations beyond their intervals, else in training; or nothing is left to gain."""
    done = sorted((e for e in history.evaluations if e.success is not None), key=lambda e: e.version)
    if len(done) > 1:
        first, last = (wilson(e.success or 0.0, e.num_rollouts) for e in (done[0], done[-1]))
        return last[0] > first[1]
    points = [point for point in history.actor if point.get(ActorMetric.SUCCESS) is not None]
    success = success_shift(points if len(points) >= FEWEST_POINTS else [])
    return success is not None and success.rose


def failures_pay(attempts: Sequence[Attempt]) -> bool:
    """Whether failures came to earn what successes earn. True where no attempts say otherwise."""
    if len(attempts) < FEWEST_ATTEMPTS:
        return True
    wins = [attempt.reward for attempt in attempts if attempt.success]
    lost = [attempt.reward for attempt in attempts if not attempt.success]
    if len(lost) < FEWEST_ATTEMPTS:
        return False
    if not wins:  # what a success would earn is not known: the usual failure is to earn more than it did
        return statistics.median(lost[-(len(lost) // 4) :]) > statistics.median(lost[: len(lost) // 4])
    enough = statistics.median(wins)
    return ends_of_many([float(reward >= enough) for reward in lost])[1] > SIGNAL


def unjudged(evidence: Evidence) -> Iterable[Cause]:
    """Groups are given up, or from one version on all answers earn the same, although they are as they were."""
    given_up = sum(evidence.dropped.values())
    if given_up > MOST * (given_up + evidence.groups):
        reason, count = max(evidence.dropped.items(), key=lambda item: item[1])
        name, cure = GIVEN_UP.get(reason, ("groups given up", "actor_*/log.txt has the reason: event=group_dropped"))
        yield Cause(
            name=name,
            step=None,
            text=f"{given_up} of {given_up + evidence.groups} groups were given up, {count} of them for `{reason}`: "
            "nothing of them is trained",
            cure=cure,
            level=Level.DELIVERY,
            command="pipelinerl ledger {run}",
        )
        return
    attempts = evidence.attempts
    errors = [attempt for attempt in attempts if attempt.is_error]
    same = trailing(attempts, lambda attempt: attempt.reward == attempts[-1].reward and not attempt.success)
    if len(errors) > MOST * len(attempts) >= MOST * FEWEST_ATTEMPTS:
        yield Cause(
            name="judge down",
            step=errors[0].version,
            text=f"{len(errors)} of {len(attempts)} answers were read, and judged with an error",
            cure="The reward is that of the error. Look at what the domain logs in actor_0/log.txt",
            level=Level.DELIVERY,
            command="pipelinerl rollouts {run} --worst 5",
        )
    elif same and is_sudden(attempts[: len(attempts) - same], attempts[-same:]):
        wins = mean_success(attempts[-same - FEWEST_ATTEMPTS : -same])
        yield Cause(
            name="judge down",
            step=attempts[-same].version,
            text=f"the last {same} attempts on record all earn {attempts[-1].reward:g}; just before, {wins:.0%} "
            "succeeded, with answers of the same length and certainty",
            cure="The policy did not change there, so what judges it did: look for its errors in actor_0/log.txt",
            level=Level.DELIVERY,
            command="pipelinerl rollouts {run} --step {step}",
        )


def is_sudden(before: Sequence[Attempt], after: Sequence[Attempt]) -> bool:
    """Whether success ended at once, and the answers next to that place have the same form."""
    near, far = before[-FEWEST_ATTEMPTS:], after[:FEWEST_ATTEMPTS]
    if min(len(near), len(far)) < FEWEST_ATTEMPTS:
        return False
    least, _ = wilson(mean_success(near), len(near))
    if (1 - least) ** len(after) > math.exp(-CERTAIN * CERTAIN):
        return False
    forms = [
        [statistics.fmean(float(value(attempt)) for attempt in part) for part in (near, far)]
        for value in (lambda attempt: attempt.tokens, lambda attempt: -attempt.certainty)
    ]
    return all(abs(new - old) <= SAME_FORM * max(abs(old), 1e-3) for old, new in forms)


def unchanged_servers(evidence: Evidence) -> Iterable[Cause]:
    """Servers say the same under versions in which the trainer has gone away from them.

    The weights of two versions are further apart than the trainer and a sampler a few steps behind it. A server that
    moved much less between them does not use what it was sent.
    """
    for drift in evidence.drifts:
        if drift.contexts < FEWEST_ATTEMPTS or drift.apart <= UNMOVED or drift.change >= UNCHANGED * drift.apart:
            continue
        yield Cause(
            name="stale server",
            step=drift.first,
            text=f"between versions {drift.first} and {drift.last} the servers' log-probabilities of {drift.contexts} "
            f"equal tokens after equal prompts changed by {drift.change:.1g} nats in the mean, while the trainer "
            f"differs from them by {drift.apart:.2g} on such tokens: they do not use the weights that they are sent",
            cure="Restart the servers"
            + ("" if evidence.history.settings.has_probe else ", with weights.probe=true, which expels such a server"),
            level=Level.DELIVERY,
            command="pipelinerl status {run}",
        )
        return


def truncated_prompts(evidence: Evidence) -> Iterable[Cause]:
    """Only a part of the problem reaches the model."""
    asked = [attempt.asked for attempt in evidence.attempts if attempt.asked]
    part = [share for share in asked if share < 1]
    if len(asked) >= FEWEST_ATTEMPTS and len(part) > MOST * len(asked):
        yield Cause(
            name="truncated prompts",
            step=None,
            text=f"in {len(part)} of {len(asked)} prompts on record only a part of the problem's text stands, "
            f"{statistics.median(part):.0%} of it in the median",
            cure="The model cannot know the rest. Compare the prompt with the problem, and look at what shortens it: "
            "the domain, a template, a limit of the prompt's length",
            level=Level.DELIVERY,
            command="pipelinerl rollouts {run} --last 3",
        )


def full_context(evidence: Evidence) -> Iterable[Cause]:
    """Answers end where the context does, before they have the tokens that they may have."""
    full = [attempt for attempt in evidence.attempts if attempt.is_full]
    if len(full) > MOST * len(evidence.attempts) >= MOST * FEWEST_ATTEMPTS:
        settings = evidence.history.settings
        yield Cause(
            name="full context",
            step=None,
            text=f"in {len(full)} of {len(evidence.attempts)} attempts prompt and answer fill the context, after "
            f"{statistics.median(attempt.tokens for attempt in full):.0f} sampled tokens in the median",
            cure=f"Raise vllm_config.vllm_kwargs.max_model_len (it is {settings.max_model_len}) to the longest prompt "
            f"and llm.parameters.max_tokens (it is {settings.max_tokens}) together, or shorten the prompts",
            level=Level.DELIVERY,
            command="pipelinerl rollouts {run} --last 3",
        )


def untrained_ends(evidence: Evidence) -> Iterable[Cause]:
    """The token that ends an answer is not trained, or does not end it."""
    ended = [attempt for attempt in evidence.attempts if attempt.is_end_trained is not None]
    lost = [attempt for attempt in ended if not attempt.is_end_trained]
    going_on = [attempt for attempt in evidence.attempts if attempt.goes_on]
    if len(ended) >= FEWEST_ATTEMPTS and len(lost) > MOST * len(ended):
        yield Cause(
            name="end of answers not trained",
            step=None,
            text=f"in {len(lost)} of {len(ended)} answers that ended by themselves the token that ended them is not "
            "trained: the policy never learns when to stop",
            cure="Give labels and log-probabilities of all sampled tokens, the last one too",
            level=Level.DELIVERY,
            command="pipelinerl rollouts {run} --last 3",
        )
    elif len(going_on) > MOST * len(evidence.attempts) >= MOST * FEWEST_ATTEMPTS:
        yield Cause(
            name="end of answers not trained",
            step=None,
            text=f"{len(going_on)} of {len(evidence.attempts)} answers go on after the token that ends an answer",
            cure="Remove `ignore_eos` from llm.parameters, and compare the model's eos_token_id with its tokenizer's",
            level=Level.DELIVERY,
            command="pipelinerl rollouts {run} --last 3",
        )


def wrong_sign(evidence: Evidence) -> Iterable[Cause]:
    """Advantages go against rewards, rewards against success, or training against advantages."""
    groups = by_group(evidence.attempts)
    signs = [
        sum(a.advantage * (a.reward - mean) for a in group if a.advantage is not None)
        for group in groups
        if (mean := statistics.fmean(a.reward for a in group)) is not None
    ]
    if (against := count_against(signs)) is not None:
        yield _sign(f"in {against} the attempts with the lower rewards have the higher advantages", "the advantage")
        return
    paid = [sum((float(a.success or 0) - mean_success(group)) * a.reward for a in group) for group in groups]
    if (against := count_against(paid)) is not None:
        yield _sign(f"in {against} the attempts that succeed earn less than those that fail", "the reward")
        return
    pulls = [a.advantage * a.moved for a in evidence.attempts if a.advantage and a.moved is not None]
    rewards = [float(p[TrainerMetric.REWARD]) for p in evidence.history.finetune if TrainerMetric.REWARD in p]
    if len(pulls) < FEWEST_ATTEMPTS or len(rewards) < FEWEST_POINTS or not shift_of(rewards).fell:
        return
    if step_length(evidence.history.finetune) > TOO_FAR:
        return
    if statistics.fmean(pulls) < -CERTAIN * statistics.stdev(pulls) / math.sqrt(len(pulls)):
        before, now = ends_of(rewards)
        text = f"the reward fell from {before:.2f} to {now:.2f}, and training makes likelier what has a low advantage"
        yield _sign(text, "the loss")


def _sign(text: str, where: str) -> Cause:
    return Cause(
        name="wrong sign",
        step=None,
        text=text,
        cure=f"Look at the sign of {where}: it is to be larger for what should be sampled more often",
        level=Level.REWARD,
        command="pipelinerl rollouts {run} --best 8",
    )


def count_against(values: Sequence[float]) -> str | None:
    """ "30 of 32 groups", if so many of the values that are not zero are negative that it is no accident."""
    signed = [value for value in values if abs(value) > 1e-9]
    negative = sum(value < 0 for value in signed)
    if len(signed) < FEWEST_POINTS or negative - len(signed) / 2 < CERTAIN * math.sqrt(len(signed)) / 2:
        return None
    return f"{negative} of {len(signed)} groups"


def noisy_judge(evidence: Evidence) -> Iterable[Cause]:
    """What equal answers to the same problem earn differs nearly as much as what different ones earn."""
    apart = between = 0.0
    equal = pairs = 0
    for group in by_group(evidence.answers):
        same: dict[bytes, list[float]] = defaultdict(list)
        for attempt in group:
            if attempt.answer is not None:
                same[attempt.answer].append(attempt.reward)
        several = [rewards for rewards in same.values() if len(rewards) > 1]
        if several and len(same) > 1:
            equal += sum(len(rewards) - 1 for rewards in several)
            apart += sum(statistics.pvariance(rewards) * len(rewards) for rewards in several)
            earned = [reward for rewards in same.values() for reward in rewards]
            pairs += len(earned) - 1
            between += statistics.pvariance(earned) * len(earned)
    if equal < FEWEST_ATTEMPTS or not between or (share := apart / equal / (between / pairs)) <= MOST:
        return
    yield Cause(
        name="noisy judge",
        step=None,
        text=f"equal answers to the same problem earn different rewards: their variance is {share:.0%} of that between "
        "all attempts at a problem",
        cure="The reward says next to nothing about the answer: look for what else it depends on, such as a judge's "
        "sampling, a state that attempts share, or an error that is paid like an answer",
        level=Level.REWARD,
        command="pipelinerl rollouts {run} --last 16",
    )


def paid_by_length(evidence: Evidence) -> Iterable[Cause]:
    """Among attempts that succeed alike, the longer ones earn more, and answers grow."""
    pays, grown = [], [float(attempt.tokens) for attempt in evidence.attempts]
    for group in by_group(evidence.attempts):
        for success in (True, False):
            alike = [a for a in group if bool(a.success) is success]
            if len({a.tokens for a in alike}) > 1:
                length = statistics.fmean(a.tokens for a in alike)
                pays.append(-sum((a.tokens - length) * a.reward for a in alike))
    against = count_against(pays)
    if against is None or len(grown) < FEWEST_ATTEMPTS or not shift_of(grown).rose:
        return
    before, now = ends_of(grown)
    yield Cause(
        name="length explosion",
        step=evidence.attempts[0].version,
        text=f"in {against} the longer of attempts that succeed alike earn more, and answers grew from {before:.0f} to "
        f"{now:.0f} tokens",
        cure="The reward pays for length: take what grows with it out of the reward",
        level=Level.REWARD,
        command="pipelinerl rollouts {run} --best 20",
    )


def wrong_difficulty(evidence: Evidence) -> Iterable[Cause]:
    """From the beginning on most groups are solved by all of their attempts, or by none, and rewards say no more.

    Too hard is what the first weights do not solve: later ones may be worse for another reason.
    """
    groups = by_group(evidence.attempts)
    if len(groups) < FEWEST_POINTS or learns(evidence.history):
        return
    flat = [group for group in groups if len({a.reward for a in group}) == 1]
    early = groups[: max(FEWEST_POINTS, len(groups) // 4)]
    low, _ = wilson(len(flat) / len(groups), len(groups))
    wins = statistics.fmean(mean_success(group) for group in early)
    if low < MOST or not sum(group in flat for group in early) / len(early) > MOST:
        return
    attempts = given(evidence.history.settings.attempts)
    text = f"in {len(flat)} of {len(groups)} groups all attempts earn the same"
    if wins > MOST:
        yield Cause(
            name="too easy",
            step=None,
            text=f"{text}, and {wins:.0%} of the first attempts succeed already: little is left to learn",
            cure="Take harder problems, and leave out those that are always solved",
            level=Level.TASK,
            command="pipelinerl rollouts {run} --last 8",
        )
    elif wins < 1 - MOST and (1 - most_first_success(evidence)) ** max(map(len, groups)) > MOST:
        asked = [attempt.asked for attempt in evidence.attempts if attempt.asked is not None]
        if (missing := asked.count(0)) > MOST * len(evidence.attempts):
            yield Cause(
                name="problem not in prompt",
                step=None,
                text=f"{text}, {wins:.1%} of the first attempts succeed, and {missing} of {len(asked)} prompts hold "
                "nothing of the problem's texts",
                cure="Read a prompt. If it does not ask the problem, mend the domain's messages or the chat template; "
                "if it asks in other words, the problems are too hard: take easier ones, or more attempts",
                level=Level.DELIVERY,
                command="pipelinerl rollouts {run} --last 3",
            )
            return
        yield Cause(
            name="too hard",
            step=None,
            text=f"{text}, and {wins:.1%} of the first attempts succeed: there is nothing to learn from",
            cure=f"Take easier problems, more attempts{attempts}, partial rewards, or a model that solves some of them",
            level=Level.TASK,
            command="pipelinerl rollouts {run} --best 8",
        )


def most_first_success(evidence: Evidence) -> float:
    """Upper end of the interval of the first weights' success rate, over training attempts and the first evaluation."""
    version = min((attempt.version for attempt in evidence.attempts), default=0)
    tried = [float(attempt.success or 0.0) for attempt in evidence.attempts if attempt.version == version]
    wins, count = sum(tried), len(tried)
    for done in evidence.history.evaluations:
        if done.version == version and done.success is not None:
            wins, count = wins + done.success * done.num_rollouts, count + done.num_rollouts
    return wilson(wins / count, count)[1] if count else 1.0


def step_too_long(evidence: Evidence) -> Iterable[Cause]:
    """A step changes so much of the policy that what was sampled just before says little about it."""
    points = evidence.history.finetune
    length, (share, place) = step_length(points), entropy_per_step(points)
    if length <= TOO_FAR and share <= TOO_MUCH:
        return
    far = [point[STEP] for point in points if (per_step(point) or 0.0) > TOO_FAR]
    yield Cause(
        name="learning rate too high",
        step=min([*far[:1], *([place] if share > TOO_MUCH else [])]),
        text=f"one optimizer step changes the log-probability of a token by up to {length:.2g} nats in the mean, and "
        f"the entropy by up to {share:.0%} of what it was at first",
        cure=f"Lower finetune.learning_rate{given(evidence.history.settings.learning_rate)}, or warm it up longer",
        level=Level.STEP,
    )


def step_too_short(evidence: Evidence) -> Iterable[Cause]:
    """Advantages differ, and the policy stays as it was."""
    points = evidence.history.finetune
    spread = any(attempt.advantage for attempt in evidence.attempts)
    known = [value for point in points if (value := per_step(point)) is not None]
    if spread and len(known) >= FEWEST_POINTS and step_length(points) < UNMOVED:
        yield Cause(
            name="learning rate too low",
            step=None,
            text=f"no optimizer step changes the log-probability of a token by more than {max(known):.1g} nats",
            cure=f"Raise finetune.learning_rate{given(evidence.history.settings.learning_rate)}",
            level=Level.STEP,
        )


def learned_by_heart(evidence: Evidence) -> Iterable[Cause]:
    """Training problems are solved more and more often, and test problems are not."""
    points = [point for point in evidence.history.actor if point.get(ActorMetric.SUCCESS) is not None]
    success = success_shift(points if len(points) >= FEWEST_POINTS else [])
    done = sorted((e for e in evidence.history.evaluations if e.success is not None), key=lambda e: e.version)
    if success is None or not success.rose or len(done) < 2 or learns(evidence.history):
        return
    last = done[-1]
    _, high = wilson(last.success or 0.0, last.num_rollouts)
    if success.now - CERTAIN * success.error > high and (last.success or 0.0) < SOLVED:
        yield Cause(
            name="success in training alone",
            step=points[0][STEP],
            text=f"success on training problems rose from {success.before:.2f} to {success.now:.2f}, and is at most "
            f"{high:.2f} on test problems",
            cure="Look for the answer in training prompts, for test problems of another kind, or for too few problems",
            level=Level.REWARD,
            command="pipelinerl rollouts {run} --best 8",
        )


def confident_failures(evidence: Evidence) -> Iterable[Cause]:
    """Of the problems to which the policy always gives the same answer, some succeed and many fail.

    A policy becomes sure of what is paid. In healthy runs of `benchmarks/why.py` at most 6 % of such groups fail.
    """
    groups = [group for group in by_group(evidence.answers) if len(group) >= MANY_EQUAL]
    sure = [
        group
        for group in groups[-(len(groups) // 3) :]
        if group[0].answer is not None and len({attempt.answer for attempt in group}) == 1
    ]
    failed = [group for group in sure if not any(attempt.success for attempt in group)]
    low, high = wilson(len(failed) / len(sure), len(sure)) if len(sure) >= FEWEST_POINTS else (0.0, 1.0)
    if low <= SIGNAL or high >= 1 - SIGNAL:
        return
    yield Cause(
        name="confident failures",
        step=None,
        text=f"in {len(failed)} of the {len(sure)} newest groups on record whose attempts all give the same answer, it "
        "fails: nothing is learned from them",
        cure="Compare these answers with their references. Wrong references, or a judge that refuses right answers, "
        "look like this; else the policy became sure of a mistake",
        level=Level.OUTCOME,
        command=f"pipelinerl rollouts {{run}} --group={shlex.quote(failed[-1][0].group)}",
    )


CHECKS: tuple[Callable[[Evidence], Iterable[Cause]], ...] = (
    unjudged,
    unchanged_servers,
    truncated_prompts,
    full_context,
    untrained_ends,
    wrong_sign,
    noisy_judge,
    paid_by_length,
    learned_by_heart,
    wrong_difficulty,
    step_too_long,
    step_too_short,
    confident_failures,
)


def by_group(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """The groups of which several attempts are on record, in order."""
    found: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        found[attempt.group].append(attempt)
    return [group for group in found.values() if len(group) > 1]


def mean_success(group: Sequence[Attempt]) -> float:
    return statistics.fmean(float(attempt.success or 0.0) for attempt in group)


def ends_of_many(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last quarter."""
    quarter = max(1, len(values) // 4)
    return statistics.fmean(values[:quarter]), statistics.fmean(values[-quarter:])


def trailing(attempts: Sequence[Attempt], holds: Callable[[Attempt], bool]) -> int:
    """How many attempts at the end all have a property."""
    return next((n for n, attempt in enumerate(reversed(attempts)) if not holds(attempt)), len(attempts))


def per_step(point: Point) -> float | None:
    """Mean size of the log-ratio of a token for each step of its lag. None where the lag is less than half a step."""
    ratio, lag = point.get(TrainerMetric.LOGRATIO_ABS_MEAN), point.get(TrainerMetric.LAG_MEAN)
    return None if ratio is None or lag is None or lag < 0.5 else ratio / lag


def step_length(points: Points) -> float:
    """The largest typical change by a step: the highest mean over a window of steps."""
    known = [value for point in points if (value := per_step(point)) is not None]
    return max((statistics.fmean(part) for part in windows(known)), default=0.0)


def entropy_per_step(points: Points) -> tuple[float, int]:
    """The lasting change of the entropy for each step, relative to the first entropy, and the step before it.

    It is the largest that happened twice from one window of steps to the next, beyond noise: one jump is no pace.
    """
    known = [point for point in points if point.get(TrainerMetric.ENTROPY) is not None]
    values = [float(point[TrainerMetric.ENTROPY]) for point in known]
    levels = [statistics.fmean(part) for part in windows(values)]
    error = noise_of(values) * math.sqrt(2 / 4)
    changes = [abs(after - before) for before, after in pairwise(levels)]
    lasting = sorted(changes)[-2] if len(changes) > 1 else 0.0
    if lasting <= CERTAIN * error:
        return 0.0, 0
    return lasting / 4 / max(levels[0], 1e-9), known[4 * changes.index(lasting)][STEP]


def windows(values: Sequence[float]) -> Iterator[Sequence[float]]:
    yield from (values[place : place + 4] for place in range(0, len(values) - 3, 4))
