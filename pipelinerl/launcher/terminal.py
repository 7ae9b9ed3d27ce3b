"""The launcher's lines: the live line of what happens now, and lines that stay (evaluations, alarms, optimizer steps).

`Terminal` prints both, `RunLine` describes a run from the roles' status files and the actor's newest metrics, and
`ProgressLines` turns messages of the run (`following`) into lines that stay. Nothing here decides anything.
"""

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from pipelinerl.config.sections import Config
from pipelinerl.inspect.finding import Level
from pipelinerl.inspect.progress import first_answers, longest_answer
from pipelinerl.inspect.report import imitates_alone, number, read_metrics_tail
from pipelinerl.inspect.why.watch import AlarmWatch
from pipelinerl.launcher.tracking import RunTracking
from pipelinerl.observability.catalogue import ActorMetric, TrainerMetric
from pipelinerl.observability.health import waits_for_role
from pipelinerl.observability.logging import shown
from pipelinerl.observability.metrics import Point
from pipelinerl.observability.status import LAUNCHER, StatusRecord, read_statuses
from pipelinerl.records.messages import (
    EvaluationDone,
    ProbeMissed,
    SamplesProcessed,
    TrainerMessage,
    TrainingResumed,
    WeightUpdateSuccess,
)

log = logging.getLogger(__name__)

REDRAW_S = 0.25
"""Between two states of the live line: four a second look alive and cost little."""
REPEAT_S = 30.0
"""Between two lines in a file or pipe while nothing else is printed, and between two optimizer steps that stay."""
SPEED_WINDOW_S = 30.0
"""The speed of optimizer steps is a mean over this time, so that it follows the run without jumping."""


class Terminal:
    """Prints the launcher's lines. A closed terminal does not end the run.

    Args:
        log: called with every line, but not with redrawn live lines.
        repeat_s: seconds of silence after which the live line is printed if it cannot be redrawn.
    """

    def __init__(self, log: Callable[[str], None], repeat_s: float = REPEAT_S):
        self._log, self._repeat_s = log, repeat_s
        self._said = time.monotonic()

    def say(self, line: str) -> None:
        """Print and log one line at once, above the live line."""
        self._said = time.monotonic()
        self._log(line)
        self.show(shown(line))

    def show(self, text: str) -> None:
        """Print a text without logging it. If the output is closed (`| head -1`) or full, later ones go nowhere."""
        try:
            print(text, flush=True)
        except OSError as error:
            self._log(f"standard output cannot be written ({error}): the run goes on, and this log has its lines")
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                lost = os.fstat(sys.stdout.fileno())
                for descriptor in (1, 2):
                    if os.path.samestat(os.fstat(descriptor), lost):
                        os.dup2(nowhere.fileno(), descriptor)  # else rich or Python's exit would fail

    @contextlib.contextmanager
    def live(self, describe: Callable[[], str]):
        """Show the line that `describe` returns while the block runs. If it raises, only the line is missing."""
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console, over = Console(), threading.Event()
        redrawn = console.is_terminal and not console.is_dumb_terminal

        def text() -> str:
            try:
                return describe()
            except Exception:  # noqa: BLE001 — files that are just being replaced, a role that writes other fields
                return ""

        def repeat() -> None:
            while not over.wait(min(REDRAW_S, self._repeat_s)):
                if redrawn:
                    line = Text(shown(text()), overflow="ellipsis", no_wrap=True)
                    with contextlib.suppress(OSError):
                        screen.update(line, refresh=True)
                elif time.monotonic() - self._said >= self._repeat_s and (now := text()):
                    self.say(now)

        screen = Live(console=console, transient=True, auto_refresh=False, redirect_stderr=False)
        thread = threading.Thread(target=repeat, name="live-line", daemon=True)
        with screen if redrawn else contextlib.nullcontext():
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
        sys.stdout.flush()


class RunLine:
    """The live line of a run. Each call returns the current text."""

    def __init__(
        self,
        run_dir: Path,
        max_train_steps: int,
        clock: Callable[[], float] = time.time,
        *,
        has_rollouts: bool = True,
    ):
        self._run_dir, self._max_train_steps, self._clock = run_dir, max_train_steps, clock
        self._has_rollouts = has_rollouts
        self._since = clock()
        self._steps: deque[tuple[float, int]] = deque()

    def __call__(self) -> str:
        now, statuses = self._clock(), read_statuses(self._run_dir)
        steps = [int(status.fields.get("step", 0)) for name, status in statuses.items() if is_trainer(name)]
        step = max(steps, default=0)
        metrics = read_metrics_tail(self._run_dir, "actor") or {}
        return describe_run(
            statuses,
            metrics,
            now,
            self._since,
            step=step,
            last=self._max_train_steps,
            speed=self._speed(now, step),
            has_rollouts=self._has_rollouts,
        )

    def _speed(self, now: float, step: int) -> float | None:
        """Optimizer steps per second over the last `SPEED_WINDOW_S`. None until two different steps were seen."""
        if step and (not self._steps or step >= self._steps[-1][1]):
            self._steps.append((now, step))
        while self._steps and now - self._steps[0][0] > SPEED_WINDOW_S and len(self._steps) > 2:
            self._steps.popleft()
        if not self._steps or step == self._steps[0][1]:
            return None
        return (step - self._steps[0][1]) / (now - self._steps[0][0])


def is_trainer(name: str) -> bool:
    return name.startswith("finetune_")


def describe_run(
    statuses: Mapping[str, StatusRecord],
    metrics: Point,
    now: float,
    since: float,
    *,
    step: int,
    last: int,
    speed: float | None,
    has_rollouts: bool = True,
) -> str:
    """Describe the phase of the run in one line, with its duration, the progress and the failed rollouts.

    Args:
        statuses: by role.
        metrics: the actor's newest.
        now: Unix time.
        since: Unix time of the roles' start.
        step: newest optimizer step.
        last: number of optimizer steps of the run.
        speed: optimizer steps per second. None = not known yet.
        has_rollouts: False for `stage: sft`.
    """
    evaluating = next((s.fields["evaluating"] for s in statuses.values() if s.fields.get("evaluating")), None)
    starting = {name: s for name, s in statuses.items() if s.state == "running" and not s.progress_count}
    if evaluating:
        parts = [f"evaluating {evaluating}", *longest_answer(metrics)]
    elif step >= last:
        parts = [f"ending: the last {'evaluation and saves' if has_rollouts else 'saves'}"]
    elif starting or not statuses:
        causes = [what_starts(name, s, now) for name, s in sorted(starting.items()) if not waits_for_role(s)]
        parts = [f"starting, {now - since:.0f} s", *causes]
    elif not step and (causes := [what_starts(name, s, now) for name, s in statuses.items() if waits_for_servers(s)]):
        parts = [f"first weights, {now - since:.0f} s", *causes]
    elif not step and any(is_trainer(name) and not status.waits for name, status in statuses.items()):
        parts = [f"first optimizer step, {now - since:.0f} s"]
    elif not step and not has_rollouts:
        parts = [f"first conversations, {now - since:.0f} s"]
    elif not step:
        parts = [f"first rollouts, {now - since:.0f} s", *first_answers(metrics, statuses)]
    else:
        parts = [f"training {step}/{last}"]
    if step and step < last:
        parts += [f"{number(speed, 2)} steps/s", f"{eta(step, last, speed)} to go"] if speed else []
    return "  ".join([*parts, *failing(metrics)])


def waits_for_servers(status: StatusRecord) -> bool:
    """Whether the role waits until servers are ready for the first weights."""
    return bool(status.waits) and status.waits[0].on == "actor_llm"


def what_starts(name: str, status: StatusRecord, now: float) -> str:
    if not status.waits:
        return f"{name}: loads"
    wait = status.waits[0]
    if wait.on == LAUNCHER:
        return f"{name}: waits for {wait.what}"
    return f"{name}: {wait.what} {now - wait.since:.0f} s"


def eta(step: int, last: int, speed: float) -> str:
    seconds = (last - step) / speed
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def failing(metrics: Point) -> list[str]:
    """Describe failed rollouts, such as `12 rollouts failed: timeout 9, domain 3`. Empty if there are none."""
    counts = {reason: int(count) for reason, count in ActorMetric.FAILURES.found(metrics).items() if count}
    if not counts:
        return []
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    return [f"{sum(counts.values())} rollouts failed: {reasons}"]


class ProgressLines:
    """Turns the messages of a run into lines for people. Used by one thread.

    Args:
        say: called with every line that stays.
        note: called with the lines of the other steps.
        every_s: least seconds between two steps that stay. The first and the last step always stay.
        tracking: gets steps and alarms.
        model: the evaluated model, in a run without a trainer.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        cfg: Config,
        say: Callable[[str], None],
        note: Callable[[str], None] = log.info,
        every_s: float = REPEAT_S,
        tracking: RunTracking | None = None,
        model: str | None = None,
    ):
        self._run_dir, self._max_train_steps = run_dir, cfg.finetune.max_train_steps
        self._say, self._note, self._every_s = say, note, every_s
        self._tracking, self._model = tracking, model
        self._alarms = AlarmWatch(run_dir, cfg)
        self._since, self._said_at = time.time(), -math.inf
        self._pause_ms: tuple[float, ...] = ()
        self._last: SamplesProcessed | None = None

    def add_message(self, message: TrainerMessage) -> None:
        """Print a message of the trainer, unless it is about an earlier launch."""
        self._alarms.add_message(message)
        match message:
            case WeightUpdateSuccess():
                self._pause_ms = message.pause_ms
            case ProbeMissed() if message.timestamp >= self._since:
                self._print_alarms()
            case TrainingResumed():
                self._last = None
                if message.timestamp >= self._since:
                    self._say(f"resuming from step {message.step} ({message.repeated} repeated)")
            case SamplesProcessed():
                if message.timestamp >= self._since and (self._last is None or message.step > self._last.step):
                    self._print_step(message)
                    self._print_alarms()
                    if self._tracking is not None:
                        self._tracking.step(message.step)
                self._last = message

    def add_result(self, result: EvaluationDone) -> None:
        """Print the result of an evaluation, unless it is one of an earlier launch."""
        if result.timestamp >= self._since:
            self._say(evaluation_line(result, self._model))

    def _print_alarms(self) -> None:
        for finding in self._alarms.new():
            self._say(f"{'speed' if finding.level is Level.SLOW else 'alarm'}: {finding.line()}")
            if self._tracking is not None:
                self._tracking.alarm(finding)

    def _print_step(self, message: SamplesProcessed) -> None:
        now = time.monotonic()
        is_due = now - self._said_at >= self._every_s or message.step >= self._max_train_steps
        if is_due:
            self._said_at = now
        seconds = message.timestamp - self._last.timestamp if self._last else None
        actor = (read_metrics_tail(self._run_dir, "actor") or {}) if message.metrics else {}
        line = step_line(message, self._max_train_steps, seconds, max(self._pause_ms, default=None), actor)
        (self._say if is_due else self._note)(line)


def step_line(
    message: SamplesProcessed,
    max_train_steps: int,
    seconds: float | None,
    pause_ms: float | None,
    actor: Point,
) -> str:
    """Describe an optimizer step. Reward and success are means over the actor's newest 1,024 rollouts or the step's.

    Args:
        seconds: since the previous step.
        pause_ms: longest pause of a server in the newest weight update.
        actor: the actor's newest metrics, or empty.

    `step 12/96 reward 0.41 success 0.55 lag 1.2 (max 3) 2,310 tok/s pause 34 ms wait 0.02 s prefix hits 0.62`, or, if
    only conversations were trained, `step 12/96 loss 0.412 nats per token held-out 0.450 2,310 tok/s wait 0.02 s`.
    """
    metrics = message.metrics
    is_actors = actor.get(ActorMetric.REWARD) is not None  # reward and success of the same rollouts
    reward = actor.get(ActorMetric.REWARD) if is_actors else metrics.get(TrainerMetric.REWARD)
    tokens = metrics.get(TrainerMetric.TOKENS)
    speed = tokens / seconds if tokens is not None and seconds and seconds > 0 else None
    if imitates_alone(message):
        held_out = metrics.get(TrainerMetric.SFT_TEST_LOSS)
        parts = [
            f"step {message.step}/{max_train_steps}",
            f"loss {number(metrics.get(TrainerMetric.SFT_LOSS), 3)} nats per token",
            *([] if held_out is None else [f"held-out {number(held_out, 3)}"]),
            f"{number(metrics.get(TrainerMetric.TOKENS_PER_S) if speed is None else speed, 0)} tok/s",
            f"wait {number(metrics.get(TrainerMetric.WAIT_S), 2)} s",
        ]
        return "  ".join(parts)
    parts = [
        f"step {message.step}/{max_train_steps}",
        f"reward {number(reward, 2)}",
        f"success {number(actor.get(ActorMetric.SUCCESS) if is_actors else None, 2)}",
        f"lag {number(metrics.get(TrainerMetric.LAG_MEAN), 1)} (max {number(metrics.get(TrainerMetric.LAG_MAX), 0)})",
        f"{number(speed, 0)} tok/s",
        f"pause {number(pause_ms, 0)} ms",
        f"wait {number(metrics.get(TrainerMetric.WAIT_S), 2)} s",
        f"prefix hits {number(actor.get(ActorMetric.PREFIX_HIT_RATE), 2)}",
    ]
    return "  ".join(parts)


def evaluation_line(result: EvaluationDone, model: str | None = None) -> str:
    """Describe a result. ``model``: the evaluated model, if it is no version of this run."""
    what = model or f"version {result.version}"
    if result.success is None:
        return f"evaluation of {what}: no result, because every attempt failed: see actor_*/log.txt"
    return (
        f"evaluation of {what}: success {result.success:.3f}  reward {number(result.reward, 2)}  "
        f"({result.num_rollouts} rollouts)"
    )
