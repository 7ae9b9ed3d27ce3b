"""What is wrong with a run by its curves and the trainer's messages: pure functions over the evidence.

To add one, write a function and list it in `METRICS`. Whether a curve moved is asked in units of the run's own noise
(`inspect.curves`). Sizes that are too much in any run are constants.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipelinerl.actor.metrics import WINDOW as ROLLOUTS_IN_MEAN
from pipelinerl.config.sections import Config
from pipelinerl.inspect.balance import advice, balance_of, cheaper_steps
from pipelinerl.inspect.curves import WINDOW, Shift, ends_of, shift_of, wilson, worth_of
from pipelinerl.inspect.finding import Finding, Level
from pipelinerl.inspect.progress import last_at
from pipelinerl.inspect.series import beyond
from pipelinerl.inspect.why.evidence import Attempt, Evidence
from pipelinerl.observability.catalogue import ActorMetric, PreprocessorMetric, TrainerMetric
from pipelinerl.records import CalibrationExceeded, EvaluationDone, ProbeMissed, WeightUpdateSuccess

FEWEST_POINTS = 12
"""The actor's points in a run of 60 fast steps."""
FEWEST_RECENT = 3
"""Newest points that must agree before a present state is reported."""
FEWEST_ATTEMPTS = 32
"""Attempts, or groups of them, below which a share says little: half of 32 has a 95 % interval of 0.34 to 0.66."""
ENTROPY_LEFT = 1 / 3
"""Share of the entropy that success explains, below which the policy is too sure. A size of effect: in healthy runs of
`benchmarks/why.py` 0.8 to 1.4 of it is left."""
SOLVED = 0.95
"""Success beyond which nothing is left to gain."""
LOW_ESS = 0.5
"""Effective share of a batch below which most of its rollouts train nothing."""
MIXED_GROUPS = 0.1
"""Share of groups with attempts that succeed and attempts that fail, below which success teaches nothing."""
PAID_FAILURES = 0.1
"""Share of the failures that earn what a success earns, from which on the reward pays for failing."""
SMALL_INTERVAL = 0.05
"""Half of the width of an evaluation's interval that is small enough to see progress."""
LENGTH_GROWTH, LENGTH_CUT, LENGTH_RUNAWAY = 2.0, 0.1, 4.0
"""Explosion: growth of the length together with this share of cut rollouts, or growth that is enough alone."""
CLIPPED = 0.3
"""Share of the tokens, which then have no gradient: they are no outliers any more."""
LARGE_GAP = 0.2
"""Mean |log-ratio| in nats: the ratio is then off by a fifth on average."""
VERSIONS_BEHIND = 3
"""Versions that may be under way to the servers, beside those of the window."""
FRESH_LOG_RATIO = 1.0
"""Nats between server and trainer on tokens that the present version sampled. Rounding in bfloat16 stays below."""
UNREADABLE, NO_SUCCESS = 0.9, 0.02
"""Least share of rollouts without an answer, and largest success by chance, if the model cannot read its prompts."""
FORKS = 0.5
"""Mean per rollout: at least every second one computes its history again."""
UNREADABLE_TEXT = 0.2
"""Share of sampled tokens that are no text."""

STATUS = "pipelinerl status {run}"


def expelled_servers(run: Evidence) -> Iterable[Finding]:
    """A server missed a weight probe."""
    missed: dict[str, ProbeMissed] = {}
    for message in run.messages:
        if isinstance(message, ProbeMissed):
            missed.setdefault(message.server, message)
    for server, first in missed.items():
        text = f"{server} did not use the weights it was sent ({first.reason})"
        fix = f"It is out of service until it passes a probe; read {server}/log.txt, restart or replace that server"
        yield Finding(Level.DELIVERY, "stale server", text, fix, STATUS, step=first.version, about=server)


def uncalibrated_servers(run: Evidence) -> Iterable[Finding]:
    """A server and the trainer disagree although both hold the model's file."""
    newest = {message.server: message for message in run.messages if isinstance(message, CalibrationExceeded)}
    for server, message in newest.items():
        text = (
            f"{server} and the trainer differ by {message.difference:.2g} nats before any update, "
            f"{message.limit:.2g} are allowed"
        )
        fix = (
            "Compare dtype, fp32_lm_head, attention and rope of both ends; if the cause is known and harmless, "
            "raise weights.probe_tolerance, else the server will miss its probe"
        )
        yield Finding(Level.DELIVERY, "calibration", text, fix, STATUS, step=0, about=server)


def lost_servers(run: Evidence) -> Iterable[Finding]:
    """The two newest weight updates do not name a server of earlier ones that has missed no probe."""
    updates = [message for message in run.messages if isinstance(message, WeightUpdateSuccess)]
    if not updates:
        return
    missed = {message.server for message in run.messages if isinstance(message, ProbeMissed)}
    served = {name for update in updates[-2:] for name in update.servers}  # a run that stops saves its last step alone
    for server in sorted({name for update in updates for name in update.servers} - served - missed):
        last = max(update.version for update in updates if server in update.servers)
        text = f"{server} has taken no weight update since version {last}"
        fix = f"Read {server}/log.txt; raise weights.timeout_s if updates are slow"
        yield Finding(Level.DELIVERY, "server out of service", text, fix, STATUS, step=last, about=server)


def other_weights(run: Evidence) -> Iterable[Finding]:
    """The trainer's log-probabilities differ from the servers' on tokens of the present version."""
    steps, largest = run.series.of(TrainerMetric.LOGRATIO_ABS_MAX_LAG0, fewest=FEWEST_RECENT)
    if seen := beyond(steps, largest, FRESH_LOG_RATIO, typical=statistics.median):
        text = (
            f"tokens that the present weights sampled differ by up to {seen.now:.2g} nats from the trainer's "
            "log-probabilities: a server samples from other weights than it says, or computes them in another way"
        )
        fix = (
            "Keep weights.probe on, restart the servers; if it stays, compare dtype and fp32_lm_head of both ends, and "
            "lower vllm_config.vllm_kwargs.max_model_len below the model's original_max_position_embeddings"
        )
        yield Finding(Level.DELIVERY, "stale server", text, fix, STATUS, step=seen.since)


def stalled_version(run: Evidence) -> Iterable[Finding]:
    """The trainer makes steps while the servers keep an old version."""
    steps, versions = run.series.of(TrainerMetric.LIVE_VERSION, fewest=WINDOW)
    if not steps or versions[-WINDOW] != versions[-1]:
        return
    steps_per_update = max(run.cfg.finetune.weight_update_interval, run.cfg.steps_per_phase)
    if steps[-1] - versions[-1] > VERSIONS_BEHIND + WINDOW + steps_per_update:
        version = int(versions[-1])
        text = f"the servers hold version {version} while the trainer is at step {steps[-1]}"
        fix = "Read finetune_0/log.txt for the failed update; an evaluation that does not end holds updates back, too"
        yield Finding(Level.DELIVERY, "stalled version", text, fix, STATUS, step=version)


def failed_groups(run: Evidence) -> Iterable[Finding]:
    """Weights came over TCP in place of NCCL."""
    for interface, (steps, counts) in run.series.parts(TrainerMetric.NCCL_GROUPS_FAILED).items():
        text = f"{max(counts):.0f} NCCL group(s) failed: their weights came over TCP through {interface}"
        fix = (
            "Read event=nccl_group_failed in finetune_0/log.txt, and the servers' logs with "
            "+vllm_config.env.NCCL_DEBUG=INFO; if NCCL takes another network, set NCCL_SOCKET_IFNAME"
        )
        yield Finding(Level.SLOW, "NCCL group failed", text, fix, STATUS, step=steps[0], about=interface)


def unreadable_output(run: Evidence) -> Iterable[Finding]:
    """The model's output cannot be read from the first rollout on."""
    command = "pipelinerl rollouts {run} --worst 5"
    if run.unreadable_share is not None and run.unreadable_share > UNREADABLE_TEXT:
        text = f"{run.unreadable_share:.0%} of the sampled tokens are no text under the run's tokenizer"
        fix = "The tokenizer in model_path does not belong to the model: take both from one checkpoint"
        yield Finding(Level.DELIVERY, "bad tokenizer", text, fix, command)
        return
    steps, unread, successes = run.series.of(ActorMetric.NO_ANSWER, ActorMetric.SUCCESS, fewest=WINDOW)
    if steps and min(unread) >= UNREADABLE and max(successes) <= NO_SUCCESS:
        text = f"no answer can be read in {unread[-1]:.0%} of the rollouts, from the first one on"
        fix = (
            "Tokenizer or chat template do not fit the model, or the task does not fit it: look at rollouts, then "
            "take model and tokenizer from one checkpoint"
        )
        yield Finding(Level.DELIVERY, "bad tokenizer", text, fix, command, step=steps[0])


def blocked_loops(run: Evidence) -> Iterable[Finding]:
    """A domain blocks the event loop of its worker."""
    for domain, (steps, seconds) in run.series.parts(ActorMetric.LOOP_BLOCKED_S).items():
        text = (
            f"domain {domain} has blocked its rollout workers for {max(seconds):.1f} s"
            f"{last_at(run.blocked_at, domain)}: all their rollouts stood still"
        )
        fix = (
            "Run the blocking call in a thread (await asyncio.to_thread(function, ...)) or use an async library. "
            "If the line is PipelineRL's own, prompts and answers are too long for it: shorten them, or raise "
            "actor.rollout_workers. event=loop_blocked in actor_*/log.txt has the stack"
        )
        yield Finding(Level.SYMPTOM, f"blocked event loop ({domain})", text, fix, step=steps[0])


def forked_conversations(run: Evidence) -> Iterable[Finding]:
    """Conversations change what the model has already said or read."""
    steps, forks, calls = run.series.of(ActorMetric.FORKS, ActorMetric.LLM_CALLS, fewest=FEWEST_RECENT)
    if seen := beyond(steps, forks, FORKS):
        text = (
            f"{seen.now:.1f} of {statistics.fmean(calls[-WINDOW:]):.1f} calls of a rollout change the history of "
            "their conversation: all is computed again"
        )
        fix = (
            "Let the agent only append to its messages and keep its tools, or change its history to shorten it; if it "
            "does, the model's chat template refuses the order of messages (llm.chat_template)"
        )
        yield Finding(Level.SYMPTOM, "forked conversations", text, fix, step=seen.since)


def reward_without_success(run: Evidence) -> Iterable[Finding]:
    """Success does not grow, and the reward grows by more than the growth of success explains."""
    trials, steps, rewards, successes = running_means(run, ActorMetric.REWARD, ActorMetric.SUCCESS)
    if not steps:
        return
    reward, success = shift_of(rewards), shift_of(successes, trials=trials)
    worth = worth_of(successes, rewards)
    rest = shift_of([round(r - worth * s, 9) for r, s in zip(rewards, successes, strict=True)])
    # Points that have rollouts in common hide as much of the rest's noise as of success's, whose noise is known.
    rest = rest._replace(error=rest.error * success.error / (shift_of(successes).error or success.error))
    if reward.rose and rest.rose and not success.rose and success.before < SOLVED:
        text = (
            f"reward went from {reward.before:.2f} to {reward.now:.2f} and success from {success.before:.2f} to "
            f"{success.now:.2f}: the policy earns reward without solving the task"
        )
        fix = "Read the best-rewarded failures (pipelinerl rollouts RUN --best 20) and close what they exploit"
        # What is paid beside success, as a form, is learned.
        level = Level.REWARD if failures_pay(run.attempts) else Level.SYMPTOM
        yield Finding(level, "reward hack", text, fix, "pipelinerl rollouts {run} --best 20", step=steps[0])


def failures_pay(attempts: Sequence[Attempt]) -> bool:
    """Whether failures now earn what successes earn. True where no attempts show otherwise."""
    if len(attempts) < FEWEST_ATTEMPTS:
        return True
    wins = [attempt.reward for attempt in attempts if attempt.success]
    lost = [attempt.reward for attempt in attempts if not attempt.success]
    if len(lost) < FEWEST_ATTEMPTS:
        return False
    quarter = len(lost) // 4
    if not wins:  # unknown what a success would earn: the usual failure must earn more than it did
        return statistics.median(lost[-quarter:]) > statistics.median(lost[:quarter])
    enough = statistics.median(wins)
    return statistics.fmean(reward >= enough for reward in lost[-quarter:]) > PAID_FAILURES


def entropy_collapse(run: Evidence) -> Iterable[Finding]:
    """The policy loses much more entropy than its success explains."""
    steps, values = run.series.of(TrainerMetric.ENTROPY, fewest=FEWEST_POINTS)
    success = success_shift(run)
    if not steps or success is None or success.now >= SOLVED:
        return
    entropy = shift_of(values)
    # A policy that knows some answers, and guesses at the others as at first, keeps entropy as it keeps failures.
    explained = entropy.before * min(1.0, (1 - success.now) / max(1 - success.before, 1 - SOLVED))
    limit = ENTROPY_LEFT * explained
    if entropy.now < limit and entropy._replace(before=explained).fell:
        text = (
            f"entropy fell from {entropy.before:.2g} to {entropy.now:.2g} nats, and success of {success.now:.2f} "
            f"explains a fall to {explained:.2g}: the policy is sure of wrong answers"
        )
        fix = "You could " + offered(
            (run.cfg.finetune.rl.entropy_bonus > 0, "set finetune.rl.entropy_bonus"),
            (False, f"raise finetune.rl.epsilon_high{given(run.cfg.finetune.rl.epsilon_high)}"),
            (False, lower_learning_rate(run.cfg)),
        )
        since = next(step for step, value in zip(steps, values, strict=True) if value < limit)
        command = "pipelinerl rollouts {run} --last 16"
        yield Finding(Level.SYMPTOM, "entropy collapse", text, fix, command, step=since)


def length_explosion(run: Evidence) -> Iterable[Finding]:
    """Answers grow until they are cut."""
    steps, lengths = run.series.of(ActorMetric.OUTPUT_TOKENS, fewest=FEWEST_POINTS)
    if not steps:
        return
    before, now = ends_of(lengths)
    _, shares = run.series.of(ActorMetric.CUT_BY_LENGTH)
    cut = statistics.fmean(shares[-WINDOW:]) if shares else 0.0
    growth = now / max(before, 1.0)
    if growth >= LENGTH_RUNAWAY or (growth >= LENGTH_GROWTH and cut >= LENGTH_CUT):
        text = f"rollouts grew from {before:.0f} to {now:.0f} sampled tokens, {cut:.0%} are cut"
        fix = "You could " + offered(
            (bool(run.cfg.preprocess.overlong_buffer_tokens), "set preprocess.overlong_buffer_tokens"),
            (run.cfg.finetune.rl.aggregation == "token_mean", "set finetune.rl.aggregation=token_mean"),
            (False, f"lower llm.parameters.max_tokens{given(run.cfg.llm.parameters.get('max_tokens'))}"),
        )
        since = next(step for step, length in zip(steps, lengths, strict=True) if length >= LENGTH_GROWTH * before)
        command = "pipelinerl rollouts {run} --last 5"
        yield Finding(Level.SYMPTOM, "length explosion", text, fix, command, step=since)


def zero_advantages(run: Evidence) -> Iterable[Finding]:
    """All attempts at every problem earn the same reward, so that nothing is learned."""
    steps, spreads = run.series.of(PreprocessorMetric.ADVANTAGE_STD, fewest=FEWEST_RECENT)
    if not steps or max(spreads[-WINDOW:]) > 1e-6:
        return
    last = max((place for place, spread in enumerate(spreads) if spread > 1e-6), default=-1)
    _, successes = run.series.of(ActorMetric.SUCCESS)
    solved = bool(successes) and statistics.fmean(successes[-WINDOW:]) > 0.5
    text = "every group's attempts earn the same reward: nothing is learned"
    fix = HARDER if solved else easier(run.cfg)
    yield Finding(Level.OUTCOME, "all-zero advantages", text, fix, step=steps[last + 1])


def clipping(run: Evidence) -> Iterable[Finding]:
    """The loss clips a large share of the tokens."""
    steps, shares = run.series.of(TrainerMetric.CLIP_FRACTION, fewest=WINDOW)
    if seen := beyond(steps, shares, CLIPPED):
        text = f"the loss clips {seen.now:.0%} of the tokens"
        yield Finding(Level.STEP, "clip fraction", text, younger(run.cfg), step=seen.since)


def mismatch(run: Evidence) -> Iterable[Finding]:
    """Trainer and servers differ much on average, with the cause that the metrics show."""
    steps, gaps = run.series.of(TrainerMetric.LOGRATIO_ABS_MEAN, fewest=WINDOW)
    if (seen := beyond(steps, gaps, LARGE_GAP)) is None:
        return
    _, lags, largest = run.series.of(TrainerMetric.LAG_MIN, TrainerMetric.LOGRATIO_ABS_MAX_LAG0)
    fresh = [gap for lag, gap in zip(lags, largest, strict=True) if lag == 0][-WINDOW:]
    if not fresh or statistics.fmean(fresh) < seen.now:
        cause = "age of the tokens" + (": fresh ones differ less" if fresh else "")
        fix = younger(run.cfg)
    else:
        cause, fix = "numerics: fresh tokens differ as well", "Compare dtype and fp32_lm_head of both ends"
    yield Finding(
        Level.STEP,
        "mismatch",
        f"trainer and servers differ by {seen.now:.2g} nats per token, and the largest cause is the {cause}",
        f"{fix}. `pipelinerl replay RUN --step {steps[-1] - 1} --mismatch` splits it further",
        "pipelinerl replay {run} --step {step} --mismatch",
        step=seen.since,
    )


def low_ess(run: Evidence) -> Iterable[Finding]:
    """Importance ratios leave less than half of the tokens effective."""
    steps, shares = run.series.of(TrainerMetric.ESS, fewest=WINDOW)
    known = [(step, share) for step, share in zip(steps, shares, strict=True) if share > 0]  # 0: nothing was sampled
    seen = beyond([step for step, _ in known], [1 - share for _, share in known], 1 - LOW_ESS)
    if seen is not None:
        text = f"the importance ratios of the tokens leave {1 - seen.now:.0%} of a batch effective"
        yield Finding(Level.SYMPTOM, "low effective sample size", text, younger(run.cfg), step=seen.since)


def teacher_in_noise(run: Evidence) -> Iterable[Finding]:
    """The teacher differs from the policy by less than the same weights do in trainer and server."""
    steps, gaps, noises = run.series.of(TrainerMetric.TEACHER_GAP, TrainerMetric.TEACHER_NOISE, fewest=WINDOW)
    # gap² = signal² + noise² for independent normal ones
    if seen := beyond(steps, [2**0.5 * noise - gap for gap, noise in zip(gaps, noises, strict=True)], 0.0):
        gap, noise = statistics.fmean(gaps[-WINDOW:]), statistics.fmean(noises[-WINDOW:])
        text = (
            f"the teacher's log-probabilities differ from the policy's by {gap:.2g} nats per token, and a server with "
            f"the policy's own weights would differ by {noise:.2g}: most of what is taught is rounding"
        )
        fix = (
            "The policy has become its teacher: stop, or learn from rewards. Or the two began as one: raise the dtype "
            "of vllm_config.vllm_kwargs and finetune, keep fp32_lm_head, or take a teacher that differs more"
        )
        yield Finding(Level.STEP, "teacher within noise", text, fix, step=seen.since)


def flat_evaluation(run: Evidence) -> Iterable[Finding]:
    """By its evaluations the run learned nothing, or lost more than their intervals allow."""
    done = evaluated(run)
    if len(done) < 2 or run.series.num_points("finetune") < FEWEST_POINTS:
        return
    first, last = done[0], done[-1]
    assert first.success is not None
    assert last.success is not None
    before, now = interval_of(first), interval_of(last)
    if now[0] > before[1] or last.success >= SOLVED:
        return
    success = success_shift(run)
    is_exact = (now[1] - now[0]) / 2 <= SMALL_INTERVAL
    if not is_exact and success is not None and success.rose:
        return  # too few test problems to contradict training
    title = "falling evaluation" if now[1] < before[0] else "flat evaluation"
    text = (
        f"success on {last.num_rollouts} test rollouts went from {first.success:.3f} to {last.success:.3f} by "
        f"version {last.version}, 95 % intervals {before[0]:.3f}–{before[1]:.3f} and {now[0]:.3f}–{now[1]:.3f}"
    )
    more = "" if is_exact else "; more test problems would show smaller progress"
    yield Finding(Level.OUTCOME, title, text, f"`pipelinerl why RUN` ranks the causes{more}", step=first.version)


def rising_entropy(run: Evidence) -> Iterable[Finding]:
    """The policy loses certainty and gains nothing for it."""
    steps, values = run.series.of(TrainerMetric.ENTROPY, fewest=FEWEST_POINTS)
    success = success_shift(run)
    if not steps or success is None or success.rose or success.now >= SOLVED:
        return
    entropy = shift_of(values)
    if entropy.rose:
        text = (
            f"entropy rose from {entropy.before:.2g} to {entropy.now:.2g} nats, {entropy.error:.1g} is noise, "
            f"while success went from {success.before:.2f} to {success.now:.2f}"
        )
        fix = "You could " + offered(
            (run.cfg.finetune.rl.entropy_bonus <= 0, "lower finetune.rl.entropy_bonus"),
            (False, lower_learning_rate(run.cfg)),
        )
        yield Finding(Level.SYMPTOM, "rising entropy", text, fix, step=steps[0])


def groups_without_signal(run: Evidence) -> Iterable[Finding]:
    """Nearly every group is solved by all of its attempts, or by none."""
    steps, always, never = run.series.of(
        ActorMetric.GROUPS_ALWAYS_SOLVED, ActorMetric.GROUPS_NEVER_SOLVED, fewest=FEWEST_RECENT
    )
    if seen := beyond(steps, never, 1 - MIXED_GROUPS):
        text = f"in {seen.now:.0%} of the newest groups no attempts succeed"
        yield Finding(Level.OUTCOME, "groups never solved", text, easier(run.cfg), step=seen.since)
    if seen := beyond(steps, always, 1 - MIXED_GROUPS):
        text = f"in {seen.now:.0%} of the newest groups all attempts succeed"
        yield Finding(Level.OUTCOME, "groups always solved", text, HARDER, step=seen.since)


TITLES = {
    "generation": "trainer waits",
    "workers": "rollout workers are full",
    "training": "servers wait",
    "between": "both wait",
}


def unbalanced(run: Evidence) -> Iterable[Finding]:
    """Generation and training do not keep up with each other."""
    balance = balance_of(run.series)
    if run.splits is not None and balance is not None and balance.narrow is not None:
        title = TITLES[balance.narrow]
        yield Finding(Level.SLOW, title, balance.text, advice(balance, run.splits, cheaper_steps(run.cfg, run.series)))


METRICS: tuple[Callable[[Evidence], Iterable[Finding]], ...] = (
    expelled_servers,
    uncalibrated_servers,
    other_weights,
    lost_servers,
    stalled_version,
    failed_groups,
    unreadable_output,
    blocked_loops,
    forked_conversations,
    reward_without_success,
    entropy_collapse,
    length_explosion,
    zero_advantages,
    clipping,
    mismatch,
    low_ess,
    teacher_in_noise,
    flat_evaluation,
    rising_entropy,
    groups_without_signal,
    unbalanced,
)


def success_shift(run: Evidence) -> Shift | None:
    """How success on training problems moved. None: too few points."""
    trials, _, successes = running_means(run, ActorMetric.SUCCESS)
    return shift_of(successes, trials=trials) if successes else None


def running_means(run: Evidence, *metrics: ActorMetric) -> tuple[Any, ...]:
    """(rollouts behind the first ones, steps, values of each metric) of the actor's points that have new rollouts.

    Steps and values are empty for fewer points than `FEWEST_POINTS`.
    """
    steps, rollouts, *values = run.series.of(ActorMetric.ROLLOUTS, *metrics)
    fresh = [i for i, count in enumerate(rollouts) if not i or count != rollouts[i - 1]]
    if len(fresh) < FEWEST_POINTS:
        return (0, [], *([] for _ in values))
    steps, rollouts, *values = ([column[i] for i in fresh] for column in (steps, rollouts, *values))
    # the first points of a slow run are means of a few rollouts
    return (min(ROLLOUTS_IN_MEAN, max(1, int(rollouts[FEWEST_POINTS // 3 - 1]))), steps, *values)


def evaluated(run: Evidence) -> list[EvaluationDone]:
    """The evaluations with a result, by version."""
    return sorted((done for done in run.evaluations if done.success is not None), key=lambda done: done.version)


def interval_of(done: EvaluationDone) -> tuple[float, float]:
    """95 % interval of an evaluation's success."""
    return wilson(done.success or 0.0, done.num_rollouts)


HARDER = "The problems are solved: stop, or take harder ones"


def easier(cfg: Config) -> str:
    return (
        f"The problems are too hard for the model: take easier ones, more attempts{given(cfg.attempts)}, or partial "
        "rewards"
    )


def younger(cfg: Config) -> str:
    """What brings the policy that trains nearer to the one that sampled."""
    return "You could " + offered(
        (cfg.max_lag_steps == 0, f"lower max_lag_steps{given(cfg.max_lag_steps)}"),
        (cfg.finetune.rl.proximal_every is not None, "set finetune.rl.proximal_every"),
        (False, lower_learning_rate(cfg)),
    )


def lower_learning_rate(cfg: Config) -> str:
    return f"lower finetune.learning_rate{given(cfg.finetune.learning_rate)}"


def offered(*options: tuple[bool, str]) -> str:
    """Return the options that are not in use already, as "a, b or c". Each is given as (is in use, text)."""
    *others, last = [text for is_used, text in options if not is_used]
    return " or ".join([", ".join(others), last] if others else [last])


def given(value: float | None) -> str:
    return "" if value is None else f" (it is {value:g})"
