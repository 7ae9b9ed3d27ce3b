"""Finds what looks wrong in a run: pure functions over metrics and the trainer's messages.

An alarm says in one line what was seen, since which step, and what to do that is not done already. It never changes the
run. To add an alarm, write a function and list it in `CHECKS`. Whether a curve moved is asked in units of the run's own
noise (`inspect.curves`). Sizes that are too much in any run are constants at the top of the module.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipelinerl.config.sections import Config
from pipelinerl.config.servers import max_model_len
from pipelinerl.inspect.balance import PARTS, Divisions, advice, balance_of
from pipelinerl.inspect.curves import WINDOW, Shift, ends_of, shift_of, wilson, worth_of
from pipelinerl.inspect.progress import last_at
from pipelinerl.observability.catalogue import STEP, TIME, ActorMetric, MetricName, PreprocessorMetric, TrainerMetric
from pipelinerl.observability.metrics import Points
from pipelinerl.records import CalibrationExceeded, EvaluationDone, ProbeMissed, TrainerMessage, WeightUpdateSuccess

FEWEST_POINTS = 12
"""A run of 60 fast steps has so many points of the actor, each the mean of hundreds of rollouts."""
ENTROPY_LEFT = 1 / 3
"""Share of the entropy that success explains, below which the policy is too sure. A size of effect: in healthy runs of
`benchmarks/why.py` 0.8 to 1.4 of it is left."""
SOLVED = 0.95
"""Success beyond which nothing is left to gain."""
ROLLOUTS_IN_MEAN = 1024
"""Rollouts behind each point of the actor's success."""
LOW_ESS = 0.5
SIGNAL = 0.1
"""Share of groups with attempts that succeed and attempts that fail, below which success teaches nothing."""
SMALL_INTERVAL = 0.05
"""Half of the width of an evaluation's interval that is small enough to see progress."""
LENGTH_GROWTH, LENGTH_CUT, LENGTH_RUNAWAY = 2.0, 0.1, 4.0
"""Explosion: growth of the length together with this share of cut rollouts, or growth that is enough alone."""
CLIPPED = 0.3
LARGE_GAP = 0.2
"""Mean size of the log-ratio in nats. A ratio is then off by a fifth in the mean."""
VERSIONS_BEHIND = 3
FRESH_LOG_RATIO = 1.0
"""Nats between server and trainer on tokens that the present version sampled. Rounding in bfloat16 stays below."""
UNREADABLE, NO_SUCCESS = 0.9, 0.02
FORKS = 0.5
"""Mean per rollout."""
UNREADABLE_TEXT = 0.2
"""Share of sampled tokens that are no text."""

READ = (
    STEP,
    TIME,
    *PARTS,
    ActorMetric.SLOTS_HELD,
    ActorMetric.CUT_BY_LENGTH,
    ActorMetric.GROUPS_ALWAYS_SOLVED,
    ActorMetric.GROUPS_NEVER_SOLVED,
    ActorMetric.FORKS,
    ActorMetric.LLM_CALLS,
    ActorMetric.NO_ANSWER,
    ActorMetric.OUTPUT_TOKENS,
    ActorMetric.REWARD,
    ActorMetric.SUCCESS,
    PreprocessorMetric.ADVANTAGE_STD,
    TrainerMetric.CLIP_FRACTION,
    TrainerMetric.ENTROPY,
    TrainerMetric.ESS,
    TrainerMetric.LAG_MIN,
    TrainerMetric.LIVE_VERSION,
    TrainerMetric.LOGRATIO_ABS_MAX_LAG0,
    TrainerMetric.LOGRATIO_ABS_MEAN,
)
"""The metrics that the checks read, beside those under `READ_OF_DOMAINS`."""
READ_OF_DOMAINS = ActorMetric.LOOP_BLOCKED_S.partition("{")[0]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One thing that looks wrong."""

    name: str
    step: int | None
    """First optimizer step to which the alarm applies. None = the whole run."""
    text: str
    cure: str
    server: str = ""
    """The server that it accuses. Empty: none, or the name says what. An alarm is its name and this, since any step."""
    is_about_speed: bool = False
    """Not about learning: the run would come to the same, sooner."""

    def line(self) -> str:
        since = "" if self.step is None else f" since step {self.step}"
        return f"{self.name}{since}: {self.text}. {self.cure}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The part of the configuration that the cures look at. A default stands for what is not known."""

    steps_per_update: int = 1
    """Optimizer steps between two weight updates."""
    learning_rate: float | None = None
    attempts: int | None = None
    max_tokens: int | None = None
    max_model_len: int | None = None
    max_lag_steps: int | None = None
    epsilon_high: float | None = None
    aggregation: str = ""
    is_overlong_penalised: bool = False
    has_entropy_bonus: bool = False
    has_proximal: bool = False
    has_probe: bool = True
    splits: Divisions | None = None
    """Of the devices. None: whether the present one is balanced is not asked."""


UNKNOWN = Settings()


def settings_of(cfg: Config, splits: Divisions | None) -> Settings:
    rl = cfg.finetune.rl
    return Settings(
        steps_per_update=max(cfg.finetune.weight_update_interval, cfg.steps_per_phase),
        learning_rate=cfg.finetune.learning_rate,
        attempts=cfg.attempts,
        max_tokens=cfg.llm.parameters.get("max_tokens"),
        max_model_len=max_model_len(cfg),
        max_lag_steps=cfg.max_lag_steps,
        epsilon_high=rl.epsilon_high,
        aggregation=rl.aggregation,
        is_overlong_penalised=bool(cfg.preprocess.overlong_buffer_tokens),
        has_entropy_bonus=rl.entropy_bonus > 0,
        has_proximal=rl.proximal_every is not None,
        has_probe=cfg.weights.probe,
        splits=splits,
    )


def offered(*options: tuple[bool, str]) -> str:
    """Return the options that are not in use already, as "a, b or c". Each is given as (is in use, text)."""
    *others, last = [text for is_used, text in options if not is_used]
    return " or ".join([", ".join(others), last] if others else [last])


@dataclass(frozen=True, kw_only=True)
class History:
    """Metrics and messages that the checks read."""

    finetune: Points = ()
    actor: Points = ()
    preprocessor: Points = ()
    messages: Sequence[TrainerMessage] = ()
    evaluations: Sequence[EvaluationDone] = ()
    settings: Settings = UNKNOWN
    blocked_at: Mapping[str, str] = field(default_factory=dict)
    """Domain → where it blocked the event loop of a rollout worker last."""
    unreadable_share: float | None = None
    """Share of sampled tokens that the tokenizer does not know or that are broken characters. None = not measured."""


def alarms(history: History) -> list[Alarm]:
    """Return all alarms of a run, the most serious first."""
    return [alarm for check in CHECKS for alarm in check(history)]


def expelled_servers(history: History) -> Iterable[Alarm]:
    """Alarm if a server missed a weight probe."""
    missed: dict[str, ProbeMissed] = {}
    for message in history.messages:
        if isinstance(message, ProbeMissed):
            missed.setdefault(message.server, message)
    for server, first in missed.items():
        yield Alarm(
            name="stale server",
            server=server,
            step=first.version,
            text=f"{server} did not use the weights it was sent ({first.reason})",
            cure=f"It is out of service until it passes a probe; read {server}/log.txt, restart or replace that server",
        )


def uncalibrated_servers(history: History) -> Iterable[Alarm]:
    """Alarm if a server and the trainer disagree although both hold the model's file."""
    found = {message.server: message for message in history.messages if isinstance(message, CalibrationExceeded)}
    for server, message in found.items():
        yield Alarm(
            name="calibration",
            server=server,
            step=0,
            text=f"{server} and the trainer differ by {message.difference:.2g} nats before any update, "
            f"{message.limit:.2g} are allowed",
            cure="Compare dtype, fp32_lm_head, attention and rope of both ends; if the cause is known and harmless, "
            "raise weights.probe_tolerance, else the server will miss its probe",
        )


def lost_servers(history: History) -> Iterable[Alarm]:
    """Alarm if the newest weight update does not name a server of earlier ones that has missed no probe."""
    updates = [message for message in history.messages if isinstance(message, WeightUpdateSuccess)]
    if not updates:
        return
    missed = {message.server for message in history.messages if isinstance(message, ProbeMissed)}
    for server in sorted({name for update in updates for name in update.servers} - set(updates[-1].servers) - missed):
        last = max(update.version for update in updates if server in update.servers)
        yield Alarm(
            name="server out of service",
            server=server,
            step=last,
            text=f"{server} has taken no weight update since version {last}",
            cure=f"Read {server}/log.txt; raise weights.timeout_s if updates are slow",
        )


def other_weights(history: History) -> Iterable[Alarm]:
    """Alarm if the trainer's log-probabilities differ from the servers' on tokens of the present version."""
    points = _with(history.finetune, TrainerMetric.LOGRATIO_ABS_MAX_LAG0)
    recent = points[-WINDOW:]
    if len(recent) < 3:
        return
    usual = statistics.median(point[TrainerMetric.LOGRATIO_ABS_MAX_LAG0] for point in recent)
    if usual > FRESH_LOG_RATIO:
        first = next(point[STEP] for point in points if point[TrainerMetric.LOGRATIO_ABS_MAX_LAG0] > FRESH_LOG_RATIO)
        yield Alarm(
            name="stale server",
            step=first,
            text=f"tokens that the present weights sampled differ by up to {usual:.2g} nats from the trainer's "
            "log-probabilities: a server samples from other weights than it says",
            cure="Keep weights.probe on, restart the servers; if it stays, compare dtype and fp32_lm_head of both ends",
        )


def stalled_version(history: History) -> Iterable[Alarm]:
    """Alarm if the trainer makes steps while the servers keep an old version."""
    recent = _with(history.finetune, TrainerMetric.LIVE_VERSION)[-WINDOW:]
    if len(recent) < WINDOW or recent[0][TrainerMetric.LIVE_VERSION] != recent[-1][TrainerMetric.LIVE_VERSION]:
        return
    usual = VERSIONS_BEHIND + WINDOW + history.settings.steps_per_update
    if recent[-1][STEP] - recent[-1][TrainerMetric.LIVE_VERSION] <= usual:
        return
    version = int(recent[-1][TrainerMetric.LIVE_VERSION])
    yield Alarm(
        name="stalled version",
        step=version,
        text=f"the servers hold version {version} while the trainer is at step {recent[-1][STEP]}",
        cure="Read finetune_0/log.txt for the failed update; an evaluation that does not end holds updates back, too",
    )


def unreadable_output(history: History) -> Iterable[Alarm]:
    """Alarm if the model's output cannot be read from the first rollout on."""
    share = history.unreadable_share
    if share is not None and share > UNREADABLE_TEXT:
        yield Alarm(
            name="bad tokenizer",
            step=None,
            text=f"{share:.0%} of the sampled tokens are no text under the run's tokenizer",
            cure="The tokenizer in model_path does not belong to the model: take both from one checkpoint",
        )
        return
    points = _with(history.actor, ActorMetric.NO_ANSWER, ActorMetric.SUCCESS, fewest=WINDOW)
    if not points:
        return
    unread = [point for point in points if point[ActorMetric.NO_ANSWER] >= UNREADABLE]
    if len(unread) == len(points) and max(point[ActorMetric.SUCCESS] for point in points) <= NO_SUCCESS:
        yield Alarm(
            name="bad tokenizer",
            step=points[0][STEP],
            text=f"no answer can be read in {unread[-1][ActorMetric.NO_ANSWER]:.0%} of the rollouts, "
            "from the first one on",
            cure="Tokenizer or chat template do not fit the model, or the task does not fit it: look at rollouts, then "
            "take model and tokenizer from one checkpoint",
        )


def blocked_loops(history: History) -> Iterable[Alarm]:
    """Alarm if a domain blocks the event loop of its worker."""
    first: dict[str, int] = {}
    for point in history.actor:
        for domain in ActorMetric.LOOP_BLOCKED_S.found(point):
            first.setdefault(domain, point[STEP])
    for domain, step in first.items():
        name = ActorMetric.LOOP_BLOCKED_S.of(domain=domain)
        seconds = max(point.get(name, 0.0) for point in history.actor)
        yield Alarm(
            name=f"blocked event loop ({domain})",
            step=step,
            text=f"domain {domain} has blocked its rollout workers for {seconds:.1f} s"
            f"{last_at(history.blocked_at, domain)}: all their rollouts stood still",
            cure="Run the blocking call in a thread (await asyncio.to_thread(function, ...)) or use an async library. "
            "If the line is PipelineRL's own, prompts and answers are too long for it: shorten them, or raise "
            "actor.rollout_workers. event=loop_blocked in actor_*/log.txt has the stack",
        )


def forked_conversations(history: History) -> Iterable[Alarm]:
    """Alarm if conversations change what the model has already said or read."""
    points = _with(history.actor, ActorMetric.FORKS, ActorMetric.LLM_CALLS)
    recent = points[-WINDOW:]
    if len(recent) < 3:
        return
    forks = statistics.fmean(point[ActorMetric.FORKS] for point in recent)
    if forks >= FORKS:
        calls = statistics.fmean(point[ActorMetric.LLM_CALLS] for point in recent)
        yield Alarm(
            name="forked conversations",
            step=next(point[STEP] for point in points if point[ActorMetric.FORKS] >= FORKS),
            text=f"{forks:.1f} of {calls:.1f} calls of a rollout change the history of their conversation: all is "
            "computed again",
            cure="Let the agent only append to its messages and keep its tools, or compact its history rarely; if it "
            "does, the model's chat template refuses the order of messages (llm.chat_template)",
        )


def reward_without_success(history: History) -> Iterable[Alarm]:
    """Alarm if success does not grow, and the reward grows by more than the growth of success explains."""
    points = _with(history.actor, ActorMetric.REWARD, ActorMetric.SUCCESS, fewest=FEWEST_POINTS)
    if not points:
        return
    rewards, successes = (
        [float(point[name]) for point in points] for name in (ActorMetric.REWARD, ActorMetric.SUCCESS)
    )
    reward, success = shift_of(rewards), shift_of(successes, trials=ROLLOUTS_IN_MEAN)
    worth = worth_of(successes, rewards)
    rest = shift_of([round(r - worth * s, 9) for r, s in zip(rewards, successes, strict=True)])
    # Points that have rollouts in common hide as much of the rest's noise as of success's, whose noise is known.
    rest = rest._replace(error=rest.error * success.error / (shift_of(successes).error or success.error))
    if reward.rose and rest.rose and not success.rose and success.before < SOLVED:
        yield Alarm(
            name="reward hack",
            step=points[0][STEP],
            text=f"reward went from {reward.before:.2f} to {reward.now:.2f} and success from {success.before:.2f} to "
            f"{success.now:.2f}: the policy earns reward without solving the task",
            cure="Read the best-rewarded failures (pipelinerl rollouts RUN --best 20) and close what they exploit",
        )


def entropy_collapse(history: History) -> Iterable[Alarm]:
    """Alarm if the policy loses much more entropy than its success explains.

    A policy that knows the answers to some problems, and guesses at the others as it did at first, has lost the entropy
    of the known ones alone: what it keeps is in proportion to its failures. One that keeps less is sure of wrong
    answers.
    """
    points = _with(history.finetune, TrainerMetric.ENTROPY, fewest=FEWEST_POINTS)
    success = success_shift(_with(history.actor, ActorMetric.SUCCESS, fewest=FEWEST_POINTS))
    if not points or success is None or success.now >= SOLVED:
        return
    values = [float(point[TrainerMetric.ENTROPY]) for point in points]
    entropy = shift_of(values)
    explained = entropy.before * min(1.0, (1 - success.now) / max(1 - success.before, 1 - SOLVED))
    limit = ENTROPY_LEFT * explained
    if entropy.now < limit and entropy._replace(before=explained).fell:
        yield Alarm(
            name="entropy collapse",
            step=next(point[STEP] for point, value in zip(points, values, strict=True) if value < limit),
            text=f"entropy fell from {entropy.before:.2g} to {entropy.now:.2g} nats, and success of {success.now:.2f} "
            f"explains a fall to {explained:.2g}: the policy is sure of wrong answers",
            cure="You could "
            + offered(
                (history.settings.has_entropy_bonus, "set finetune.rl.entropy_bonus"),
                (False, f"raise finetune.rl.epsilon_high{given(history.settings.epsilon_high)}"),
                (False, f"lower finetune.learning_rate{given(history.settings.learning_rate)}"),
            ),
        )


def length_explosion(history: History) -> Iterable[Alarm]:
    """Alarm if answers grow until they are cut."""
    points = _with(history.actor, ActorMetric.OUTPUT_TOKENS, fewest=FEWEST_POINTS)
    if not points:
        return
    before, now = ends_of([float(point[ActorMetric.OUTPUT_TOKENS]) for point in points])
    cut = statistics.fmean(point.get(ActorMetric.CUT_BY_LENGTH) or 0.0 for point in points[-WINDOW:])
    growth = now / max(before, 1.0)
    if growth >= LENGTH_RUNAWAY or (growth >= LENGTH_GROWTH and cut >= LENGTH_CUT):
        first = next(point[STEP] for point in points if point[ActorMetric.OUTPUT_TOKENS] >= LENGTH_GROWTH * before)
        yield Alarm(
            name="length explosion",
            step=first,
            text=f"rollouts grew from {before:.0f} to {now:.0f} sampled tokens, {cut:.0%} are cut",
            cure="You could "
            + offered(
                (history.settings.is_overlong_penalised, "set preprocess.overlong_buffer_tokens"),
                (history.settings.aggregation == "token_mean", "set finetune.rl.aggregation=token_mean"),
                (False, f"lower llm.parameters.max_tokens{given(history.settings.max_tokens)}"),
            ),
        )


def zero_advantages(history: History) -> Iterable[Alarm]:
    """Alarm if all attempts at every problem earn the same reward, so that nothing is learned."""
    points = _with(history.preprocessor, PreprocessorMetric.ADVANTAGE_STD)
    recent = points[-WINDOW:]
    if len(recent) < 3 or any(point[PreprocessorMetric.ADVANTAGE_STD] > 1e-6 for point in recent):
        return
    last = max((i for i, point in enumerate(points) if point[PreprocessorMetric.ADVANTAGE_STD] > 1e-6), default=-1)
    successes = [point[ActorMetric.SUCCESS] for point in _with(history.actor, ActorMetric.SUCCESS)][-WINDOW:]
    solved = bool(successes) and statistics.fmean(successes) > 0.5
    yield Alarm(
        name="all-zero advantages",
        step=points[last + 1][STEP],
        text="every group's attempts earn the same reward: nothing is learned",
        cure="The problems are solved: stop, or take harder ones"
        if solved
        else "The problems are too hard for the model: take easier ones, more "
        f"attempts{given(history.settings.attempts)}, or partial rewards",
    )


def clipping(history: History) -> Iterable[Alarm]:
    """Alarm if the loss clips a large share of the tokens."""
    points = _with(history.finetune, TrainerMetric.CLIP_FRACTION, fewest=WINDOW)
    if not points:
        return
    now = statistics.fmean(point[TrainerMetric.CLIP_FRACTION] for point in points[-WINDOW:])
    if now > CLIPPED:
        first = next(point[STEP] for point in points if point[TrainerMetric.CLIP_FRACTION] > CLIPPED)
        yield Alarm(
            name="clip fraction",
            step=first,
            text=f"the loss clips {now:.0%} of the tokens",
            cure="You could " + younger(history.settings),
        )


def mismatch(history: History) -> Iterable[Alarm]:
    """Alarm if trainer and servers differ much in the mean, with the cause that the metrics show."""
    points = _with(history.finetune, TrainerMetric.LOGRATIO_ABS_MEAN, fewest=WINDOW)
    if not points:
        return
    now = statistics.fmean(point[TrainerMetric.LOGRATIO_ABS_MEAN] for point in points[-WINDOW:])
    if now <= LARGE_GAP:
        return
    fresh_ones = [point for point in points if point.get(TrainerMetric.LAG_MIN) == 0][-WINDOW:]
    fresh = [float(point.get(TrainerMetric.LOGRATIO_ABS_MAX_LAG0) or 0.0) for point in fresh_ones]
    first = next(point[STEP] for point in points if point[TrainerMetric.LOGRATIO_ABS_MEAN] > LARGE_GAP)
    cause, cure = (
        ("age of the tokens" + (": fresh ones differ less" if fresh else ""), "You could " + younger(history.settings))
        if not fresh or statistics.fmean(fresh) < now
        else ("numerics: fresh tokens differ as well", "Compare dtype and fp32_lm_head of both ends")
    )
    yield Alarm(
        name="mismatch",
        step=first,
        text=f"trainer and servers differ by {now:.2g} nats per token, and the largest cause is the {cause}",
        cure=f"{cure}. `pipelinerl replay RUN --step {points[-1][STEP] - 1} --mismatch` splits it further",
    )


def flat_evaluation(history: History) -> Iterable[Alarm]:
    """Alarm if evaluations say that nothing was learned, or more was lost than their intervals allow."""
    done = sorted((e for e in history.evaluations if e.success is not None), key=lambda e: e.version)
    if len(done) < 2 or len(history.finetune) < FEWEST_POINTS:
        return
    first, last = done[0], done[-1]
    assert first.success is not None
    assert last.success is not None
    before, now = wilson(first.success, first.num_rollouts), wilson(last.success, last.num_rollouts)
    if now[0] > before[1] or last.success >= SOLVED:
        return
    success = success_shift(_with(history.actor, ActorMetric.SUCCESS, fewest=FEWEST_POINTS))
    is_exact = (now[1] - now[0]) / 2 <= SMALL_INTERVAL
    if not is_exact and success is not None and success.rose:
        return  # too few test problems to contradict training
    fell = now[1] < before[0]
    yield Alarm(
        name="falling evaluation" if fell else "flat evaluation",
        step=first.version,
        text=f"success on {last.num_rollouts} test rollouts went from {first.success:.3f} to {last.success:.3f} by "
        f"version {last.version}, 95 % intervals {before[0]:.3f}–{before[1]:.3f} and {now[0]:.3f}–{now[1]:.3f}",
        cure="`pipelinerl why RUN` ranks the causes"
        if is_exact
        else "`pipelinerl why RUN` ranks the causes; more test problems would show smaller progress",
    )


def low_ess(history: History) -> Iterable[Alarm]:
    """Alarm if importance ratios leave less than half of the tokens effective."""
    known = _with(history.finetune, TrainerMetric.ESS, fewest=WINDOW)
    points = [point for point in known if point[TrainerMetric.ESS] > 0]  # 0: nothing was sampled, so there is no ratio
    now = statistics.fmean(point[TrainerMetric.ESS] for point in points[-WINDOW:]) if points else 1.0
    if now < LOW_ESS:
        first = next(point[STEP] for point in points if point[TrainerMetric.ESS] < LOW_ESS)
        yield Alarm(
            name="low effective sample size",
            step=first,
            text=f"the importance ratios of the tokens leave {now:.0%} of a batch effective",
            cure="You could " + younger(history.settings),
        )


def rising_entropy(history: History) -> Iterable[Alarm]:
    """Alarm if the policy loses certainty and gains nothing for it."""
    points = _with(history.finetune, TrainerMetric.ENTROPY, fewest=FEWEST_POINTS)
    success = success_shift(_with(history.actor, ActorMetric.SUCCESS, fewest=FEWEST_POINTS))
    if not points or success is None or success.rose or success.now >= SOLVED:
        return
    entropy = shift_of([float(point[TrainerMetric.ENTROPY]) for point in points])
    if entropy.rose:
        settings = history.settings
        yield Alarm(
            name="rising entropy",
            step=points[0][STEP],
            text=f"entropy rose from {entropy.before:.2g} to {entropy.now:.2g} nats, {entropy.error:.1g} is noise, "
            f"while success went from {success.before:.2f} to {success.now:.2f}",
            cure="You could "
            + offered(
                (not settings.has_entropy_bonus, "lower finetune.rl.entropy_bonus"),
                (False, f"lower finetune.learning_rate{given(settings.learning_rate)}"),
            ),
        )


def groups_without_signal(history: History) -> Iterable[Alarm]:
    """Alarm if nearly every group is solved by all of its attempts, or by none."""
    always, never = ActorMetric.GROUPS_ALWAYS_SOLVED, ActorMetric.GROUPS_NEVER_SOLVED
    points = _with(history.actor, always, never, fewest=3)
    recent = points[-WINDOW:]
    for name, word, cure in (
        (never, "never", f"Take easier problems, more attempts{given(history.settings.attempts)}, or partial rewards"),
        (always, "always", "The problems are solved: stop, or take harder ones"),
    ):
        share = statistics.fmean(point[name] for point in recent) if recent else 0.0
        if share > 1 - SIGNAL:
            yield Alarm(
                name=f"groups {word} solved",
                step=next(point[STEP] for point in points if point[name] > 1 - SIGNAL),
                text=f"in {share:.0%} of the newest groups {'all' if word == 'always' else 'no'} attempts succeed",
                cure=cure,
            )


def unbalanced(history: History) -> Iterable[Alarm]:
    """Alarm if generation and training do not keep up with each other."""
    splits, balance = history.settings.splits, balance_of(history.finetune, history.actor)
    if splits is not None and balance is not None and balance.narrow is not None:
        yield Alarm(
            name={"generation": "trainer waits", "training": "servers wait", "between": "both wait"}[balance.narrow],
            step=None,
            text=balance.text,
            cure=advice(balance, splits),
            is_about_speed=True,
        )


def younger(settings: Settings) -> str:
    """What brings the policy that trains nearer to the one that sampled."""
    return offered(
        (settings.max_lag_steps == 0, f"lower max_lag_steps{given(settings.max_lag_steps)}"),
        (settings.has_proximal, "set finetune.rl.proximal_every"),
        (False, f"lower finetune.learning_rate{given(settings.learning_rate)}"),
    )


def given(value: float | None) -> str:
    return "" if value is None else f" (it is {value:g})"


CHECKS: tuple[Callable[[History], Iterable[Alarm]], ...] = (
    expelled_servers,
    uncalibrated_servers,
    other_weights,
    lost_servers,
    stalled_version,
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
    flat_evaluation,
    rising_entropy,
    groups_without_signal,
    unbalanced,
)
"""The most serious first."""


def _with(points: Points, *names: MetricName, fewest: int = 0) -> Points:
    """Return the points that have all these metrics, or nothing if they are fewer than `fewest`."""
    found = [point for point in points if all(point.get(name) is not None for name in names)]
    return found if len(found) >= fewest else []


def success_shift(points: Points) -> Shift | None:
    """How success on training problems moved. None without points."""
    if not points:
        return None
    return shift_of([float(point[ActorMetric.SUCCESS]) for point in points], trials=ROLLOUTS_IN_MEAN)
