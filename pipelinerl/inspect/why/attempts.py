"""Why a run does not learn: checks of single attempts, which show more than curves do. Pure.

To add a check, write a function and list it in `ATTEMPTS`. `causes` ranks all that was found.
"""

import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from pipelinerl.config.servers import max_model_len
from pipelinerl.inspect.curves import CERTAIN, ends_of, noise_of, shift_of, wilson
from pipelinerl.inspect.finding import Finding, Level, found, in_order
from pipelinerl.inspect.why.evidence import Attempt, Evidence
from pipelinerl.inspect.why.metrics import (
    FEWEST_ATTEMPTS,
    FEWEST_POINTS,
    LOW_ESS,
    METRICS,
    SOLVED,
    STATUS,
    evaluated,
    given,
    interval_of,
    success_shift,
)
from pipelinerl.observability.catalogue import ActorMetric, TrainerMetric
from pipelinerl.records.drops import DropReason

MOST = 0.5
"""Share of the attempts beyond which the run has a fault."""
SAME_FORM = 0.5
"""Largest relative change of length and certainty between answers that count as equal."""
PACE = 4
"""Steps over which a change counts as lasting."""
LEAST_LAG = 0.5
"""Mean lag in steps from which a change is divided by it. Below, most tokens are from the present version."""
TOO_FAR = math.sqrt(2 * math.log(1 / LOW_ESS) / math.pi)
"""Mean size of the log-ratio of a token per step of its lag, in nats. One step then leaves `LOW_ESS` of the tokens
effective: normal log-ratios of deviation σ leave exp(−σ²), and their mean size is σ √(2/π)."""
TOO_MUCH = 1 / FEWEST_POINTS
"""Lasting change of the entropy by one step, relative to the first entropy: the first policy is gone in fewer steps
than a curve needs. A size of effect: learning also changes the entropy beyond noise."""
UNCHANGED = 0.1
"""Change of a server's log-probabilities over many versions, relative to the trainer's distance from the server.
A server that kept its weights repeats its numbers. The tenth leaves room for evaluated tokens, which are surer."""
UNMOVED = 1e-4
"""The trainer's distance in nats in a run whose weights do not change the answers."""
MANY_EQUAL = 4
"""Attempts at one problem that are all equal: the policy is sure."""
SURE_FAILURES = 0.1
"""Share of the groups of one answer that fail. In healthy runs of `benchmarks/why.py` it is at most .06."""

GIVEN_UP: Mapping[str, str] = {
    DropReason.VERIFIER: "judge down",
    DropReason.DOMAIN_ERROR: "domain fails",
    DropReason.NO_TRAINED_TOKENS: "nothing to train",
    DropReason.TRANSPORT: "servers fail",
    DropReason.WEIGHTS: "servers fail",
    DropReason.TIMEOUT: "rollouts time out",
    DropReason.PROMPT_TOO_LONG: "sequences too long",
    DropReason.TOO_LONG: "sequences too long",
    DropReason.TOO_LARGE: "groups too large",
    DropReason.POISONOUS: "workers die",
}
"""Title of the finding where the actor gave up most groups for this reason."""


def causes(run: Evidence) -> list[Finding]:
    """What keeps the run from learning, the likeliest first. Empty for a run in which nothing looks wrong."""
    by_attempts = found(ATTEMPTS, run)
    named = {finding.title for finding in by_attempts}
    by_curves = [one for one in found(METRICS, run) if one.level is not Level.SLOW and one.title not in named]
    if "confident failures" in named:
        wrong_references = "If the answers of the confident failures below are right, mend their references. Else: "
        by_curves = [
            replace(one, fix=wrong_references + one.fix) if one.title == "entropy collapse" else one
            for one in by_curves
        ]
    return in_order([*by_attempts, *by_curves])


def unjudged(run: Evidence) -> Iterable[Finding]:
    """Groups are given up, or from one version on all answers earn the same, although they are as they were."""
    given_up = sum(run.dropped.values())
    if given_up > MOST * (given_up + run.groups):
        reason, count = max(run.dropped.items(), key=lambda item: item[1])
        title, known = GIVEN_UP.get(reason, "groups given up"), DropReason.of(reason)
        fix = "actor_*/log.txt has the reason: event=group_dropped" if known is None else known.fix
        text = (
            f"{given_up} of {given_up + run.groups} groups were given up, {count} of them for `{reason}`: "
            "nothing of them is trained"
        )
        yield Finding(Level.DELIVERY, title, text, fix, "pipelinerl status {run} --ledger")
        return
    attempts = run.attempts
    errors = [attempt for attempt in attempts if attempt.is_error]
    same = trailing(attempts, lambda attempt: attempt.reward == attempts[-1].reward and not attempt.success)
    if len(errors) > MOST * len(attempts) >= MOST * FEWEST_ATTEMPTS:
        text = f"{len(errors)} of {len(attempts)} answers were read, but the judge failed on them"
        fix = "The reward is that of the error. Look at what the domain logs in actor_0/log.txt"
        command = "pipelinerl rollouts {run} --worst 5"
        yield Finding(Level.DELIVERY, "judge down", text, fix, command, step=errors[0].version)
    elif same and is_sudden(attempts[: len(attempts) - same], attempts[-same:]):
        wins = mean_success(attempts[-same - FEWEST_ATTEMPTS : -same])
        text = (
            f"the last {same} attempts on record all earn {attempts[-1].reward:g}; just before, {wins:.0%} "
            "succeeded, with answers of the same length and certainty"
        )
        fix = "The policy did not change there, so what judges it did: look for its errors in actor_0/log.txt"
        command = "pipelinerl rollouts {run} --step {step}"
        yield Finding(Level.DELIVERY, "judge down", text, fix, command, step=attempts[-same].version)


def is_sudden(before: Sequence[Attempt], after: Sequence[Attempt]) -> bool:
    """Whether success ended at once, while length and certainty of the answers did not change."""
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


def unchanged_servers(run: Evidence) -> Iterable[Finding]:
    """Servers return the same log-probabilities under versions that differ for the trainer."""
    # The weights of two versions are further apart than the trainer and a sampler a few steps behind it. A server that
    # moved much less between them does not use what it was sent.
    stale = (
        drift
        for drift in run.drifts
        if drift.contexts >= FEWEST_ATTEMPTS and drift.apart > UNMOVED and drift.change < UNCHANGED * drift.apart
    )
    if drift := next(stale, None):
        text = (
            f"between versions {drift.first} and {drift.last} the servers' log-probabilities of {drift.contexts} "
            f"equal tokens after equal prompts changed by {drift.change:.1g} nats on average, while the trainer "
            f"differs from them by {drift.apart:.2g} on such tokens: they do not use the weights that they are sent"
        )
        probe = "" if run.cfg.weights.probe else ", with weights.probe=true, which expels such a server"
        yield Finding(Level.DELIVERY, "stale server", text, f"Restart the servers{probe}", STATUS, step=drift.first)


def truncated_prompts(run: Evidence) -> Iterable[Finding]:
    """Only a part of the problem reaches the model."""
    asked = [attempt.asked for attempt in run.attempts if attempt.asked]
    part = [share for share in asked if share < 1]
    if len(asked) >= FEWEST_ATTEMPTS and len(part) > MOST * len(asked):
        text = (
            f"in {len(part)} of {len(asked)} prompts on record only a part of the problem's text stands, "
            f"{statistics.median(part):.0%} of it in the median"
        )
        fix = (
            "The model cannot know the rest. Compare the prompt with the problem, and look at what shortens it: "
            "the domain, a template, a limit of the prompt's length"
        )
        yield Finding(Level.DELIVERY, "truncated prompts", text, fix, "pipelinerl rollouts {run} --last 3")


def full_context(run: Evidence) -> Iterable[Finding]:
    """Answers end where the context does, before they have the tokens that they may have."""
    full = [attempt for attempt in run.attempts if attempt.is_full]
    if len(full) > MOST * len(run.attempts) >= MOST * FEWEST_ATTEMPTS:
        text = (
            f"in {len(full)} of {len(run.attempts)} attempts prompt and answer fill the context, after "
            f"{statistics.median(attempt.tokens for attempt in full):.0f} sampled tokens in the median"
        )
        fix = (
            f"Raise vllm_config.vllm_kwargs.max_model_len (it is {max_model_len(run.cfg)}) to the longest prompt "
            f"and llm.parameters.max_tokens (it is {run.cfg.llm.parameters.get('max_tokens')}) together, or shorten "
            "the prompts"
        )
        yield Finding(Level.DELIVERY, "full context", text, fix, "pipelinerl rollouts {run} --last 3")


def untrained_ends(run: Evidence) -> Iterable[Finding]:
    """The token that ends an answer is not trained, or does not end it."""
    title, command = "end of answers not trained", "pipelinerl rollouts {run} --last 3"
    ended = [attempt for attempt in run.attempts if attempt.is_end_trained is not None]
    lost = [attempt for attempt in ended if not attempt.is_end_trained]
    going_on = [attempt for attempt in run.attempts if attempt.goes_on]
    if len(ended) >= FEWEST_ATTEMPTS and len(lost) > MOST * len(ended):
        text = (
            f"in {len(lost)} of {len(ended)} answers that ended by themselves the token that ended them is not "
            "trained: the policy never learns when to stop"
        )
        fix = "Give labels and log-probabilities of all sampled tokens, the last one too"
        yield Finding(Level.DELIVERY, title, text, fix, command)
    elif len(going_on) > MOST * len(run.attempts) >= MOST * FEWEST_ATTEMPTS:
        text = f"{len(going_on)} of {len(run.attempts)} answers go on after the token that ends an answer"
        fix = "Remove `ignore_eos` from llm.parameters, and compare the model's eos_token_id with its tokenizer's"
        yield Finding(Level.DELIVERY, title, text, fix, command)


def wrong_sign(run: Evidence) -> Iterable[Finding]:
    """Advantages go against rewards, rewards against success, or training against advantages."""
    text, where = signs_against(run)
    if where:
        fix = f"Look at the sign of {where}: it must be larger for better rollouts"
        yield Finding(Level.REWARD, "wrong sign", text, fix, "pipelinerl rollouts {run} --best 8")


def signs_against(run: Evidence) -> tuple[str, str]:
    """(what contradicts what, whose sign is wrong). Empty: nothing is."""
    groups = by_group(run.attempts)
    signs = [
        sum(a.advantage * (a.reward - mean) for a in group if a.advantage is not None)
        for group in groups
        for mean in [statistics.fmean(a.reward for a in group)]
    ]
    if (against := count_against(signs)) is not None:
        return f"in {against} the attempts with the lower rewards have the higher advantages", "the advantage"
    paid = [sum((float(a.success or 0) - mean_success(group)) * a.reward for a in group) for group in groups]
    if (against := count_against(paid)) is not None:
        return f"in {against} the attempts that succeed earn less than those that fail", "the reward"
    pulls = [a.advantage * a.moved for a in run.attempts if a.advantage and a.moved is not None]
    _, rewards = run.series.of(TrainerMetric.REWARD, fewest=FEWEST_POINTS)
    if len(pulls) < FEWEST_ATTEMPTS or not rewards or not shift_of(rewards).fell or step_length(run) > TOO_FAR:
        return "", ""
    if statistics.fmean(pulls) >= -CERTAIN * statistics.stdev(pulls) / math.sqrt(len(pulls)):
        return "", ""
    before, now = ends_of(rewards)
    fell = f"the reward fell from {before:.2f} to {now:.2f}"
    return f"{fell}, and training makes likelier what has a low advantage", "the loss"


def count_against(values: Sequence[float]) -> str | None:
    """ "30 of 32 groups", if more of the values other than zero are negative than chance explains."""
    signed = [value for value in values if abs(value) > 1e-9]
    negative = sum(value < 0 for value in signed)
    if len(signed) < FEWEST_POINTS or negative - len(signed) / 2 < CERTAIN * math.sqrt(len(signed)) / 2:
        return None
    return f"{negative} of {len(signed)} groups"


def noisy_judge(run: Evidence) -> Iterable[Finding]:
    """What equal answers to the same problem earn differs nearly as much as what different ones earn."""
    apart = between = 0.0
    equal = pairs = 0
    for group in by_group(run.answers):
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
    text = (
        f"equal answers to the same problem earn different rewards: their variance is {share:.0%} of that between "
        "all attempts at a problem"
    )
    fix = (
        "The reward says next to nothing about the answer: look for what else it depends on, such as a judge's "
        "sampling, a state that attempts share, or an error that is paid like an answer"
    )
    yield Finding(Level.REWARD, "noisy judge", text, fix, "pipelinerl rollouts {run} --last 16")


def paid_by_length(run: Evidence) -> Iterable[Finding]:
    """Among attempts that succeed alike, the longer ones earn more, and answers grow."""
    pays, grown = [], [float(attempt.tokens) for attempt in run.attempts]
    for group in by_group(run.attempts):
        for success in (True, False):
            alike = [a for a in group if bool(a.success) is success]
            if len({a.tokens for a in alike}) > 1:
                length = statistics.fmean(a.tokens for a in alike)
                pays.append(-sum((a.tokens - length) * a.reward for a in alike))
    against = count_against(pays)
    if against is None or len(grown) < FEWEST_ATTEMPTS or not shift_of(grown).rose:
        return
    before, now = ends_of(grown)
    text = (
        f"in {against} the longer of attempts that succeed alike earn more, and answers grew from {before:.0f} to "
        f"{now:.0f} tokens"
    )
    fix = "The reward pays for length: take what grows with it out of the reward"
    command, first = "pipelinerl rollouts {run} --best 20", run.attempts[0].version
    yield Finding(Level.REWARD, "length explosion", text, fix, command, step=first)


def wrong_difficulty(run: Evidence) -> Iterable[Finding]:
    """From the beginning most groups are solved by all of their attempts or by none, and rewards add nothing."""
    groups = by_group(run.attempts)
    if len(groups) < FEWEST_POINTS or learns(run):
        return
    flat = [group for group in groups if len({a.reward for a in group}) == 1]
    early = groups[: max(FEWEST_POINTS, len(groups) // 4)]  # later weights may be worse for another reason
    low, _ = wilson(len(flat) / len(groups), len(groups))
    wins = statistics.fmean(mean_success(group) for group in early)
    if low < MOST or not sum(group in flat for group in early) / len(early) > MOST:
        return
    text = f"in {len(flat)} of {len(groups)} groups all attempts earn the same"
    if wins > MOST:
        text += f", and {wins:.0%} of the first attempts succeed already: little is left to learn"
        fix = "Take harder problems, and leave out those that are always solved"
        yield Finding(Level.TASK, "too easy", text, fix, "pipelinerl rollouts {run} --last 8")
    elif wins < 1 - MOST and (1 - most_first_success(run)) ** max(map(len, groups)) > MOST:
        asked = [attempt.asked for attempt in run.attempts if attempt.asked is not None]
        if (missing := asked.count(0)) > MOST * len(run.attempts):
            text += (
                f", {wins:.1%} of the first attempts succeed, and {missing} of {len(asked)} prompts hold "
                "nothing of the problem's texts"
            )
            fix = (
                "Read a prompt. If it does not ask the problem, mend the domain's messages or the chat template; "
                "if it asks in other words, the problems are too hard: take easier ones, or more attempts"
            )
            yield Finding(Level.DELIVERY, "problem not in prompt", text, fix, "pipelinerl rollouts {run} --last 3")
            return
        text += f", and {wins:.1%} of the first attempts succeed: there is nothing to learn from"
        fix = (
            f"Take easier problems, more attempts{given(run.cfg.attempts)}, partial rewards, or a model that solves "
            "some of them"
        )
        yield Finding(Level.TASK, "too hard", text, fix, "pipelinerl rollouts {run} --best 8")


def most_first_success(run: Evidence) -> float:
    """Upper end of the interval of the first weights' success rate, over training attempts and the first evaluation."""
    version = min((attempt.version for attempt in run.attempts), default=0)
    tried = [float(attempt.success or 0.0) for attempt in run.attempts if attempt.version == version]
    wins, count = sum(tried), len(tried)
    for done in evaluated(run):
        if done.version == version and done.success is not None:
            wins, count = wins + done.success * done.num_rollouts, count + done.num_rollouts
    return wilson(wins / count, count)[1] if count else 1.0


def learns(run: Evidence) -> bool:
    """Whether success rose: in evaluations beyond their intervals, else in training."""
    done = evaluated(run)
    if len(done) > 1:
        return interval_of(done[-1])[0] > interval_of(done[0])[1]
    success = success_shift(run)
    return success is not None and success.rose


def step_too_long(run: Evidence) -> Iterable[Finding]:
    """A step changes the policy so much that answers sampled just before hardly train it."""
    length, (share, place) = step_length(run), entropy_per_step(run)
    if length <= TOO_FAR and share <= TOO_MUCH:
        return
    far = [step for step, change in changes_per_step(run) if change > TOO_FAR]
    text = (
        f"one optimizer step changes the log-probability of a token by up to {length:.2g} nats on average, and "
        f"the entropy by up to {share:.0%} of what it was at first"
    )
    fix = f"Lower finetune.learning_rate{given(run.cfg.finetune.learning_rate)}, or warm it up longer"
    first = min([*far[:1], *([place] if share > TOO_MUCH else [])])
    yield Finding(Level.STEP, "learning rate too high", text, fix, step=first)


def learned_by_heart(run: Evidence) -> Iterable[Finding]:
    """Training problems are solved more and more often, and test problems are not."""
    success, done = success_shift(run), evaluated(run)
    if success is None or not success.rose or len(done) < 2 or learns(run):
        return
    last = done[-1].success or 0.0
    _, high = interval_of(done[-1])
    if success.now - CERTAIN * success.error > high and last < SOLVED:
        text = (
            f"success on training problems rose from {success.before:.2f} to {success.now:.2f}, and is at most "
            f"{high:.2f} on test problems"
        )
        fix = "Look for the answer in training prompts, for test problems of another kind, or for too few problems"
        steps, _ = run.series.of(ActorMetric.SUCCESS)
        command = "pipelinerl rollouts {run} --best 8"
        yield Finding(Level.REWARD, "success in training alone", text, fix, command, step=steps[0])


def confident_failures(run: Evidence) -> Iterable[Finding]:
    """Among problems that always get the same answer, some succeed and many fail."""
    groups = [group for group in by_group(run.answers) if len(group) >= MANY_EQUAL]
    sure = [
        group
        for group in groups[-(len(groups) // 3) :]
        if group[0].answer is not None and len({attempt.answer for attempt in group}) == 1
    ]
    failed = [group for group in sure if not any(attempt.success for attempt in group)]
    low, high = wilson(len(failed) / len(sure), len(sure)) if len(sure) >= FEWEST_POINTS else (0.0, 1.0)
    if low <= SURE_FAILURES or high >= 1 - SURE_FAILURES:
        return
    text = (
        f"in {len(failed)} of the {len(sure)} newest groups on record whose attempts all give the same answer, it "
        "fails: nothing is learned from them"
    )
    fix = (
        "Compare these answers with their references. Wrong references, or a judge that refuses right answers, "
        "look like this; else the policy became sure of a mistake"
    )
    command = f"pipelinerl rollouts {{run}} --group={shlex.quote(failed[-1][0].group)}"
    yield Finding(Level.OUTCOME, "confident failures", text, fix, command)


ATTEMPTS: tuple[Callable[[Evidence], Iterable[Finding]], ...] = (
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
    confident_failures,
)


def by_group(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """The groups with several attempts on record, in order."""
    members: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        members[attempt.group].append(attempt)
    return [group for group in members.values() if len(group) > 1]


def mean_success(group: Sequence[Attempt]) -> float:
    return statistics.fmean(float(attempt.success or 0.0) for attempt in group)


def trailing(attempts: Sequence[Attempt], holds: Callable[[Attempt], bool]) -> int:
    """How many attempts at the end all have a property."""
    return next((n for n, attempt in enumerate(reversed(attempts)) if not holds(attempt)), len(attempts))


def changes_per_step(run: Evidence) -> list[tuple[int, float]]:
    """(step, mean size of the log-ratio of a token for each step of its lag)."""
    points = zip(*run.series.of(TrainerMetric.LOGRATIO_ABS_MEAN, TrainerMetric.LAG_MEAN), strict=True)
    return [(step, ratio / lag) for step, ratio, lag in points if lag >= LEAST_LAG]


def step_length(run: Evidence) -> float:
    """The largest typical change by a step: the highest mean over a window of steps."""
    changes = [change for _, change in changes_per_step(run)]
    return max((statistics.fmean(part) for part in windows(changes)), default=0.0)


def entropy_per_step(run: Evidence) -> tuple[float, int]:
    """The lasting change of the entropy for each step, relative to the first entropy, and the step before it."""
    steps, values = run.series.of(TrainerMetric.ENTROPY)
    levels = [statistics.fmean(part) for part in windows(values)]
    error = noise_of(values) * math.sqrt(2 / PACE)
    changes = [abs(after - before) for before, after in pairwise(levels)]
    lasting = sorted(changes)[-2] if len(changes) > 1 else 0.0  # happened twice: one jump is no pace
    if lasting <= CERTAIN * error:
        return 0.0, 0
    return lasting / PACE / max(levels[0], 1e-9), steps[PACE * changes.index(lasting)]


def windows(values: Sequence[float]) -> Iterator[Sequence[float]]:
    yield from (values[place : place + PACE] for place in range(0, len(values) - PACE + 1, PACE))
