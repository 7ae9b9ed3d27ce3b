"""Prints the lines that stay on the terminal: evaluations, alarms, and an optimizer step at most every 30 s.

`TopicFollower` reads the topics `trainer` and `evaluation` in a thread, and so finds out whether training is done.
`ProgressLines` turns their messages and the newest actor metrics into lines, none about earlier launches.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pipelinerl.config.sections import Config
from pipelinerl.inspect.finding import Level
from pipelinerl.inspect.report import imitates_alone, number, read_metrics_tail
from pipelinerl.inspect.why.watch import AlarmWatch
from pipelinerl.launcher.tracking import RunTracking
from pipelinerl.observability.catalogue import ActorMetric, TrainerMetric
from pipelinerl.observability.metrics import Point
from pipelinerl.records.messages import (
    EvaluationDone,
    EvaluationMessage,
    ProbeMissed,
    SamplesProcessed,
    TrainerMessage,
    TrainingDone,
    TrainingResumed,
    WeightUpdateSuccess,
)
from pipelinerl.records.topics import EVALUATION, TRAINER

log = logging.getLogger(__name__)

POLL_S = 0.5
STEP_S = 30.0


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
        every_s: float = STEP_S,
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
        (self._say if is_due else self._note)(self._line(message))

    def _line(self, message: SamplesProcessed) -> str:
        seconds = message.timestamp - self._last.timestamp if self._last else None
        actor = (read_metrics_tail(self._run_dir, "actor") or {}) if message.metrics else {}
        return step_line(message, self._max_train_steps, seconds, max(self._pause_ms, default=None), actor)


class TopicFollower:
    """A thread that reads the topics `trainer` and `evaluation` and hands every message to ``lines``.

    Args:
        last_step: optimizer step with which training is done.
    """

    def __init__(self, run_dir: Path, lines: ProgressLines, *, last_step: int):
        self._run_dir, self._lines, self._last_step = run_dir, lines, last_step
        self._stop = threading.Event()
        self._training_done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def training_done(self) -> bool:
        """Whether the trainer made its last step. Reads the topic if the thread has not read that yet."""
        return self._training_done.is_set() or any(map(self._ends_training, self._trainer_messages()))

    def _ends_training(self, message: TrainerMessage) -> bool:
        return isinstance(message, TrainingDone) and message.step >= self._last_step

    def _trainer_messages(self) -> list[TrainerMessage]:
        from pipelinerl.errors import StreamError
        from pipelinerl.streams import SingleStreamSpec, open_reader

        try:
            with open_reader(
                SingleStreamSpec(self._run_dir, TRAINER), TrainerMessage, name=None, over_damage=True
            ) as reader:
                return [message for _, message in reader.read_all()]
        except StreamError:
            return []

    def _run(self) -> None:
        """Consume both topics. Ends with `stop`. A failure only costs lines."""
        from pipelinerl.streams import SingleStreamSpec, open_reader

        while not self._stop.is_set():
            try:
                trainer = open_reader(
                    SingleStreamSpec(self._run_dir, TRAINER), TrainerMessage, name=None, over_damage=True
                )
                evaluation = open_reader(
                    SingleStreamSpec(self._run_dir, EVALUATION), EvaluationMessage, name=None, over_damage=True
                )
                with trainer, evaluation:
                    while not self._stop.is_set():
                        for _, message in trainer.poll(POLL_S):
                            self._lines.add_message(message)
                            if self._ends_training(message):
                                self._training_done.set()
                        for _, result in evaluation.poll(0):
                            if isinstance(result, EvaluationDone):
                                self._lines.add_result(result)
                    return
            except Exception:  # a broken stream is reported by the roles that need it
                log.exception("event=progress_lines_failed")
                self._stop.wait(5)


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
