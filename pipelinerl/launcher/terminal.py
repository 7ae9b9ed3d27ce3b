"""What the user sees while the run goes on: one line per optimizer step, one per evaluation, none of earlier launches.

Consumes topics `trainer` and `evaluation` and the newest actor metrics in a thread of its own; never decides anything.
Knows whether training is done, because it reads that anyway.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipelinerl.inspect.report import number
from pipelinerl.records.messages import (
    EvaluationDone,
    EvaluationMessage,
    SamplesProcessed,
    TrainerMessage,
    TrainingDone,
    TrainingResumed,
    WeightUpdateSuccess,
)
from pipelinerl.records.topics import EVALUATION, TRAINER

log = logging.getLogger(__name__)

POLL_S = 0.5


class ProgressLines:
    """Follows a run from its topics; `say` gets every line."""

    def __init__(self, run_dir: Path, *, max_train_steps: int, say: Callable[[str], None]):
        self._run_dir = run_dir
        self._max_train_steps = max_train_steps
        self._say = say
        self._stop = threading.Event()
        self._training_done = threading.Event()
        self._pause_ms: tuple[float, ...] = ()
        self._last: SamplesProcessed | None = None
        self._since = time.time()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def training_done(self) -> bool:
        """Whether the trainer has said so; asks the topic itself, for a thread may lag behind."""
        return self._training_done.is_set() or any(
            isinstance(m, TrainingDone) and m.step >= self._max_train_steps for m in self._trainer_messages()
        )

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
        """Consumes both topics from where they end now; ends with `stop`. A failure costs lines, not the run."""
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
                            self._take(message)
                        for _, result in evaluation.poll(0):
                            if isinstance(result, EvaluationDone) and result.timestamp >= self._since:
                                self._say(evaluation_line(result))
                    return
            except Exception:  # a broken stream is reported by the roles that need it
                log.exception("the progress lines cannot be read; trying again")
                self._stop.wait(5)

    def _take(self, message: TrainerMessage) -> None:
        match message:
            case WeightUpdateSuccess():
                self._pause_ms = message.pause_ms
            case TrainingDone() if message.step >= self._max_train_steps:
                self._training_done.set()
            case TrainingResumed():
                self._last = None
                if message.timestamp >= self._since:
                    self._say(f"resuming from step {message.step} ({message.repeated} repeated)")
            case SamplesProcessed():
                if message.timestamp >= self._since and (self._last is None or message.step > self._last.step):
                    self._say(self._line(message))
                self._last = message

    def _line(self, message: SamplesProcessed) -> str:
        seconds = message.timestamp - self._last.timestamp if self._last else None
        actor = (read_metrics_tail(self._run_dir, "actor") or {}) if message.metrics else {}
        return step_line(message, self._max_train_steps, seconds, max(self._pause_ms, default=None), actor)


def read_metrics_tail(run_dir: Path, kind: str, tail_bytes: int = 8192) -> dict[str, Any] | None:
    """The newest point of a kind, without reading the whole file."""
    path = run_dir / "metrics" / f"{kind}.jsonl"
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, path.stat().st_size - tail_bytes))
            lines = stream.read().splitlines()
        return json.loads(lines[-1]) if lines else None
    except (OSError, ValueError):
        return None


def step_line(
    message: SamplesProcessed,
    max_train_steps: int,
    seconds: float | None,
    pause_ms: float | None,
    actor: Mapping[str, Any],
) -> str:
    """`step 12/96 reward 0.41 success 0.55 lag 1.2 (max 3) 2,310 tok/s pause 34 ms wait 0.02 s prefix hits 0.62`."""
    metrics = message.metrics
    success = metrics.get("success", actor.get("success"))
    tokens = metrics.get("tokens")
    speed = tokens / seconds if tokens is not None and seconds and seconds > 0 else None
    parts = [
        f"step {message.step}/{max_train_steps}",
        f"reward {number(metrics.get('reward'), 2)}",
        f"success {number(success, 2)}",
        f"lag {number(metrics.get('lag_mean'), 1)} (max {number(metrics.get('lag_max'), 0)})",
        f"{number(speed, 0)} tok/s",
        f"pause {number(pause_ms, 0)} ms",
        f"wait {number(metrics.get('wait_s'), 2)} s",
        f"prefix hits {number(actor.get('prefix_hit_rate'), 2)}",
    ]
    return "  ".join(parts)


def evaluation_line(result: EvaluationDone) -> str:
    return (
        f"evaluation of version {result.version}: success {result.success:.3f}  reward {result.reward:.2f}  "
        f"({result.num_rollouts} rollouts)"
    )
