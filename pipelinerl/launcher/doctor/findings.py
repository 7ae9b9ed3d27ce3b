"""Findings about a domain from what the players earned. Pure: observations → findings.

No check is written for a domain. Thresholds are confidence intervals: a player is reported only if the lower end of its
interval lies above the upper end of what `chance` earns in the same domain.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipelinerl.inspect.curves import wilson
from pipelinerl.inspect.finding import Finding, Level
from pipelinerl.launcher.doctor.policies import CHANCE, PADDED, REFERENCE, UNRELATED

HALF = 0.5
"""Success of a coin, which a player without knowledge does not surely beat."""
CONTEXT = 16
"""Characters before an answer that `copying_rule` looks at."""
SLOW_S, SLOWER_THAN_MEDIAN = 2.0, 10.0
"""A judge is slow if one answer takes it both this many seconds and this many times the median."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One rollout of one player."""

    player: str
    problem: int
    prompt: str
    """The first request's. Empty if there was none."""
    reward: float = 0.0
    success: bool = False
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""
    """The domain's error, with its line. Empty: it returned a result."""
    from_outside: bool = False
    """Whether a service caused the error, so that the run would repeat the rollout."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that was observed of one domain."""

    rollouts: Sequence[Observation]
    repeats: Sequence[tuple[Observation, Observation]] = ()
    """The same answer to the same problem, twice."""
    outages: Sequence[Observation] = ()
    """Rollouts whose server failed."""
    train_prompts: Sequence[str] = ()
    test_prompts: Sequence[str] = ()
    answers: Mapping[int, str] | None = None
    """The right value by problem. None: no value of the problems is one."""
    hidden: Sequence[str] = ()
    """Values of the problems that most prompts do not show (`policies.hidden_fields`)."""


def by_player(rollouts: Iterable[Observation]) -> dict[str, list[Observation]]:
    found: dict[str, list[Observation]] = {}
    for rollout in rollouts:
        if not rollout.error:
            found.setdefault(rollout.player, []).append(rollout)
    return found


def success_interval(rollouts: Sequence[Observation]) -> tuple[float, float]:
    return wilson(statistics.fmean(rollout.success for rollout in rollouts), len(rollouts))


def solved_of(rollouts: Sequence[Observation]) -> str:
    return f"{sum(rollout.success for rollout in rollouts)} of {len(rollouts)}"


def mean_reward(rollouts: Sequence[Observation]) -> float:
    return statistics.fmean(rollout.reward for rollout in rollouts)


def pays_more(some: Sequence[Observation], others: Sequence[Observation]) -> bool:
    """Whether ``some`` earn surely more than ``others`` on the problems that both played (a sign test at 5 %)."""
    rewards = {rollout.problem: rollout.reward for rollout in others}
    differences = [rollout.reward - rewards[rollout.problem] for rollout in some if rollout.problem in rewards]
    unequal = [difference for difference in differences if abs(difference) > 1e-9]
    if not unequal or statistics.fmean(differences) <= 0:
        return False
    return wilson(sum(difference > 0 for difference in unequal) / len(unequal), len(unequal))[0] > HALF


def outages(seen: Seen) -> Iterable[Finding]:
    paid = [rollout for rollout in seen.outages if not rollout.error]
    if not paid:
        return
    yield Finding(
        Level.DELIVERY,
        "a server that fails becomes a reward",
        f"{len(paid)} of {len(seen.outages)} rollouts whose server was down returned a result, with "
        f"rewards from {min(r.reward for r in paid):g} to {max(r.reward for r in paid):g}",
        "let the error of `llm_async_generate` leave generate_rollout: the actor repeats such a rollout",
    )


def errors(seen: Seen) -> Iterable[Finding]:
    found: dict[str, list[Observation]] = {}
    for rollout in seen.rollouts:
        if rollout.error and not rollout.from_outside:
            found.setdefault(rollout.error, []).append(rollout)
    for error, rollouts in found.items():
        yield Finding(
            Level.DELIVERY,
            "an answer makes the domain raise",
            f"{error}, for {', '.join(sorted({rollout.player for rollout in rollouts}))}",
            "give such an answer the reward of one that cannot be read: a failed rollout teaches nothing",
        )


def answers_differ(rollouts: Iterable[Observation]) -> str | None:
    """The player that is surely better: `REFERENCE` or `CHANCE`, or "neither" if both surely succeed.

    None: the value that was tried makes no difference, so it is not the answer.
    """
    players = by_player(rollouts)
    own, other = players.get(REFERENCE, []), players.get(CHANCE, [])
    if not own or not other:
        return None
    (own_low, own_high), (other_low, other_high) = success_interval(own), success_interval(other)
    if own_low > other_high:
        return REFERENCE
    if other_low > own_high:
        return CHANCE
    return "neither" if min(own_low, other_low) > HALF else None


def wrong_sign(seen: Seen) -> Iterable[Finding]:
    players = by_player(seen.rollouts)
    right, wrong = players.get(REFERENCE), players.get(CHANCE)
    if not right or not wrong or (pays_more(right, wrong) and answers_differ(seen.rollouts) == REFERENCE):
        return
    yield Finding(
        Level.REWARD,
        "a right answer is paid no more than a wrong one",
        f"mean reward {mean_reward(right):g} for the problems' own answers (success {solved_of(right)}), "
        f"{mean_reward(wrong):g} for those of other problems (success {solved_of(wrong)})",
        "look at the sign and the comparison of the reward",
    )


def never_right(seen: Seen) -> Iterable[Finding]:
    tried = [rollout for rollout in seen.rollouts if not rollout.error]
    if not seen.hidden or seen.answers is not None or not tried or any(rollout.success for rollout in tried):
        return
    if wilson(1.0, len({rollout.problem for rollout in tried}))[0] <= HALF:
        return  # so few problems that an answer to all of them would have counted as chance
    yield Finding(
        Level.REWARD,
        "no answer is right",
        f"the problems hold {', '.join(seen.hidden)}, which the prompts do not show, but none of them "
        "succeeds as an answer, in any format that the prompts name",
        "check the judge on one problem by hand: pipelinerl.testing.run_rollout plays a given answer",
    )


def given_away(seen: Seen) -> Iterable[Finding]:
    """Players that succeed without the answer."""
    players = by_player(seen.rollouts)
    chance = success_interval(players[CHANCE])[1] if players.get(CHANCE) else HALF
    for name, rollouts in players.items():
        if name in (REFERENCE, CHANCE, PADDED):
            continue
        low = success_interval(rollouts)[0]
        if low > chance:
            yield Finding(
                Level.REWARD,
                f"the judge accepts: {name}",
                f"success {solved_of(rollouts)}, by chance at most {chance:.0%}; e.g. problem "
                f"{next(rollout.problem for rollout in rollouts if rollout.success)}",
                "a policy finds this before it finds the task: make the judge read one answer, in its format",
            )


def better_than_wrong(seen: Seen) -> Iterable[Finding]:
    """Players that give no answer and earn more than a wrong one in the right format."""
    players = by_player(seen.rollouts)
    wrong = [rollout for rollout in players.get(CHANCE, ()) if not rollout.success]
    if not wrong:
        return
    for name in UNRELATED:
        if name in players and not any(r.success for r in players[name]) and pays_more(players[name], wrong):
            yield Finding(
                Level.REWARD,
                f"no answer is paid more than a wrong one: {name}",
                f"mean reward {mean_reward(players[name]):g} against {mean_reward(wrong):g}",
                "a policy that is often wrong learns not to answer: pay it at most what a wrong answer earns",
            )


def filler_is_paid(seen: Seen) -> Iterable[Finding]:
    players = by_player(seen.rollouts)
    plain, padded = players.get(REFERENCE), players.get(PADDED)
    if not plain or not padded or not pays_more(padded, plain):
        return
    yield Finding(
        Level.REWARD,
        "the same answer is paid more when it is longer",
        f"mean reward {mean_reward(padded):g} with filler behind it, {mean_reward(plain):g} without",
        "pay for the answer alone: a policy fills its answers up to the limit",
    )


def unstable(seen: Seen) -> Iterable[Finding]:
    different = [(a, b) for a, b in seen.repeats if not (a.error or b.error) and abs(a.reward - b.reward) > 1e-6]
    if not different:
        return
    first, second = max(different, key=lambda pair: abs(pair[0].reward - pair[1].reward))
    yield Finding(
        Level.REWARD,
        "the judge disagrees with itself",
        f"{len(different)} of {len(seen.repeats)} answers were rewarded differently the second time, e.g. "
        f"{first.reward:g} and {second.reward:g} for problem {first.problem} ({first.player})",
        "the noise hides the difference between attempts: seed the judge, or take the mean of several votes",
    )


def same_prompts(seen: Seen) -> Iterable[Finding]:
    tried = [rollout for rollout in seen.rollouts if not rollout.error and rollout.prompt]
    if seen.answers is None or len(set(seen.answers.values())) < 2 or any(r.calls > 1 for r in tried):
        return
    if len({rollout.prompt for rollout in tried}) > 1:
        return
    yield Finding(
        Level.TASK,
        "every problem has the same prompt",
        f"{len(seen.answers)} problems with {len(set(seen.answers.values()))} different answers ask the "
        "same question, and nothing follows it",
        "put the problem's question into the prompt",
    )


def leaks(seen: Seen) -> Iterable[Finding]:
    if seen.answers is None:
        return
    prompts = {rollout.problem: rollout.prompt for rollout in seen.rollouts if rollout.prompt}
    pairs = [(prompts[index], answer) for index, answer in seen.answers.items() if index in prompts]
    if len({prompt for prompt, _ in pairs}) < 2:
        return
    context, copied, tried = copying_rule(pairs)
    if not tried or wilson(copied / tried, tried)[0] <= HALF:
        return
    yield Finding(
        Level.TASK,
        "the prompt holds the answer",
        f"what stands behind {context!r} is the answer of {copied} of {tried} problems",
        "leave it out of the prompt: a policy learns to copy it",
    )


def copying_rule(pairs: Sequence[tuple[str, str]]) -> tuple[str, int, int]:
    """The best rule "the answer follows this context": (context, problems that it solves, problems tried).

    Args:
        pairs: prompt and right value of each problem. The first half gives the rule, the second tests it.
    """
    half = (len(pairs) + 1) // 2
    contexts: set[str] = set()
    for prompt, answer in pairs[:half]:
        for context in {prompt[max(0, at - CONTEXT) : at] for at in places(prompt, answer)}:
            contexts.update(context[-size:] for size in (CONTEXT, CONTEXT // 2, CONTEXT // 4) if context)
    if not contexts:
        return "", 0, 0
    solved = {context: sum(follows(*pair, context) for pair in pairs[:half]) for context in sorted(contexts)}
    best = max(solved, key=lambda context: (solved[context], len(context)))
    rest = pairs[half:]
    return best, sum(follows(*pair, best) for pair in rest), len(rest)


def places(prompt: str, answer: str) -> list[int]:
    """Offsets at which the answer is in the prompt as a whole value."""
    whole = r"(?<![\w.])" + re.escape(answer) + r"(?![\w])"
    return [match.start() for match in re.finditer(whole, prompt)]


def follows(prompt: str, answer: str, context: str) -> bool:
    """Whether the answer follows the first occurrence of the context."""
    at = prompt.find(context)
    return at >= 0 and at + len(context) in places(prompt, answer)


def in_both_sets(seen: Seen) -> Iterable[Finding]:
    train, test = [list(map(normalised, prompts)) for prompts in (seen.train_prompts, seen.test_prompts)]
    if not test or len(set(train)) < len(train) / 2 or len(set(test)) < len(test) / 2:
        return  # the prompts do not tell the problems apart
    known = set(train)
    shared = sum(prompt in known for prompt in test)
    within = 1 - len(known) / len(train)
    if wilson(shared / len(test), len(test))[0] <= wilson(within, len(train))[1] or shared < 2:
        return
    yield Finding(
        Level.TASK,
        "test problems are trained",
        f"{shared} of {len(test)} test prompts are training prompts too, but for case, spaces and signs",
        "hold them out: success on them measures memory",
    )


def normalised(prompt: str) -> str:
    return " ".join(re.findall(r"\w+|[^\w\s.,;:!?]", prompt.casefold()))


def slow(seen: Seen) -> Iterable[Finding]:
    seconds = [rollout.seconds for rollout in seen.rollouts]
    if len(seconds) < 2:
        return
    median, worst = statistics.median(seconds), max(seen.rollouts, key=lambda rollout: rollout.seconds)
    if worst.seconds <= max(SLOW_S, SLOWER_THAN_MEDIAN * median):
        return
    yield Finding(
        Level.SLOW,
        "an answer takes the judge long",
        f"{worst.seconds:.1f} s for {worst.player} on problem {worst.problem}, median {median:.3f} s",
        "give the judge a deadline, or let the verifier judge in a process of its own",
    )


DOMAIN: tuple[Callable[[Seen], Iterable[Finding]], ...] = (
    outages,
    errors,
    wrong_sign,
    never_right,
    given_away,
    better_than_wrong,
    filler_is_paid,
    unstable,
    same_prompts,
    leaks,
    in_both_sets,
    slow,
)
"""The most harmful first."""


def earnings(rollouts: Sequence[Observation]) -> list[tuple[str, float, float, float]]:
    """(player, success, mean reward, mean tokens), in the order in which they played."""
    return [
        (name, statistics.fmean(r.success for r in own), mean_reward(own), statistics.fmean(r.tokens for r in own))
        for name, own in by_player(rollouts).items()
    ]
