"""When the trainer's state is saved: every so many steps, when the newest checkpoint is old, at a stop, at the end.

Everything is collective. What a checkpoint no longer needs of the streams is released once it is published.
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
    """Decides for one ``saver``; ``release`` lets go of the stream below the given positions."""

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
        """Begin what is due after a step; training goes on meanwhile."""
        if self._is_export_step(counters.step):
            self._save(counters, export=True)
        elif self._is_rolling_due():
            self._save(counters, export=False)
        else:
            self._release(self._saver.poll(), counters.step)

    def export_again(self, counters: Counters) -> None:
        """Export the model of the step that is resumed from, if it was lost between its checkpoint and its export."""
        if counters.step and self._is_export_step(counters.step) and not self._saver.has_export(counters.step):
            self._save(counters, export=True)

    def at_stop(self, counters: Counters) -> None:
        """Asked to stop: every finished step is saved when this returns."""
        if self._saver.step != counters.step:
            self._save(counters, export=False)
        self.wait(counters.step)
        log.info("stopped step=%d saved=%d", counters.step, self._saver.step)

    def at_end(self, counters: Counters) -> None:
        """Begin to save and export the last step; ``wait`` for it."""
        self.wait(counters.step)
        if self._saver.step != counters.step or not self._saver.has_export(counters.step):
            self._save(counters, export=True)

    def wait(self, step: int) -> None:
        """Until everything that was begun is published; ``step`` is the newest."""
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
        """Whether the newest checkpoint is so old that all ranks want another."""
        minutes = self._finetune.save_checkpoint_minutes
        return minutes is not None and self._engine.lowest(int(self._saver.is_idle_since(60 * minutes))) == 1

    def _release(self, needed: Positions | None, step: int) -> None:
        """Let go of the stream below the oldest checkpoint that is kept."""
        if needed is not None:
            self._release_stream(needed)
            self._status.progress(saved=self._saver.step == step)
