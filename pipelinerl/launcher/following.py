"""Reads the topics `trainer` and `evaluation` during a run: for the terminal's lines and the end of the training."""

import logging
import threading
from pathlib import Path
from typing import Any

from pipelinerl.errors import StreamError
from pipelinerl.launcher.terminal import ProgressLines
from pipelinerl.records.messages import EvaluationDone, EvaluationMessage, TrainerMessage, TrainingDone
from pipelinerl.records.topics import EVALUATION, TRAINER
from pipelinerl.streams import SingleStreamSpec, TopicReader, open_reader

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Longest delay of a line behind its message in the topic `evaluation`."""


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
        try:
            with self._open(TRAINER, TrainerMessage) as reader:
                return [message for _, message in reader.read_all()]
        except StreamError:
            return []

    def _open(self, topic: str, record_type: Any) -> TopicReader[Any]:
        return open_reader(SingleStreamSpec(self._run_dir, topic), record_type, name=None, over_damage=True)

    def _run(self) -> None:
        """Consume both topics. Ends with `stop`. A failure only costs lines."""
        while not self._stop.is_set():
            try:
                trainer, evaluation = self._open(TRAINER, TrainerMessage), self._open(EVALUATION, EvaluationMessage)
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
