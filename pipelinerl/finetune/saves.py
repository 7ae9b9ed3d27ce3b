"""Schedules saves of the trainer's state: every n steps, when the newest checkpoint is old, at a stop, at the end.

All methods are collective. Once a checkpoint is published, the stream records that no checkpoint needs are released.
"""

import logging
from collections.abc import Callable

from pipelinerl.config.sections import FinetuneSection
from pipelinerl.finetune.checkpoints import Counters
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.saving import Positions, Saver
from pipelinerl.observability.status import RoleStatus

log = logging.getLogger(__name__)


class SaveSchedule:
    """Decides when ``saver`` saves. Calls ``release`` with the positions below which the stream is no longer needed."""

    def __init__(
        self,
        saver: Saver,
        engine: Engine,
        finetune: FinetuneSection,
        status: RoleStatus,
        release: Callable[[Positions], None],
    ):
        self._saver, self._engine, self._finetune = saver, engine, finetune
        self._status, self._release_stream = status, release

    def after_step(self, counters: Counters) -> None:
        """Start the save that is due after a step, if any. Training continues while it is written."""
        if self._is_export_step(counters.step):
            self._save(counters, export=True)
        elif self._is_rolling_due():
            self._save(counters, export=False)
        else:
            self._release(self._saver.poll(), counters.step)

    def export_again(self, counters: Counters) -> None:
        """Export the model of the resumed step if the run died between its checkpoint and its export."""
        if counters.step and self._is_export_step(counters.step) and not self._saver.has_export(counters.step):
            self._save(counters, export=True)

    def at_stop(self, counters: Counters) -> None:
        """Save the last finished step, after a request to stop. Returns when it is on disk."""
        if self._saver.step != counters.step:
            self._save(counters, export=False)
        self.wait(counters.step)
        log.info("event=stopped step=%d saved=%d", counters.step, self._saver.step)

    def at_end(self, counters: Counters) -> None:
        """Start to save and export the last step. Call ``wait`` to complete it."""
        self.wait(counters.step)
        if self._saver.step != counters.step or not self._saver.has_export(counters.step):
            self._save(counters, export=True)

    def wait(self, step: int) -> None:
        """Wait until the save in progress is published. ``step``: finished optimizer steps."""
        with self._status.waiting("the checkpoint to be written"):
            self._release(self._saver.finish(), step)

    def close(self) -> None:
        self._saver.close()

    def _save(self, counters: Counters, *, export: bool) -> None:
        self.wait(counters.step)
        self._saver.start(counters, export=export)

    def _is_export_step(self, step: int) -> bool:
        return step % self._finetune.save_checkpoint_steps == 0

    def _is_rolling_due(self) -> bool:
        """Whether on every rank the newest checkpoint is older than `save_checkpoint_minutes`."""
        minutes = self._finetune.save_checkpoint_minutes
        return minutes is not None and self._engine.lowest(int(self._saver.is_idle_since(60 * minutes))) == 1

    def _release(self, needed: Positions | None, step: int) -> None:
        """Release the stream records before the positions of the oldest kept checkpoint."""
        if needed is not None:
            self._release_stream(needed)
            self._status.progress(saved=self._saver.step == step)
