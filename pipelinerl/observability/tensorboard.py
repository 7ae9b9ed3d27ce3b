"""A run in TensorBoard: event files in `tensorboard/<role>` of the run folder, written by TensorBoard's own library.

    tensorboard --logdir results/x/tensorboard

It takes curves only: alerts, tables and the report are on the terminal and in the run folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config.sections import Config

FOLDER = "tensorboard"


class TensorBoardTracker:
    """One kind of role's curves."""

    def __init__(self, cfg: Config, run_dir: Path, kind: str):
        from tensorboard.summary import Writer

        self._writer = Writer(str(run_dir / FOLDER / kind))

    def log(self, point: Mapping[str, float], step: int) -> None:
        for name, value in point.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def alert(self, title: str, text: str) -> None: ...

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None: ...

    def keep(self, path: Path) -> None: ...

    def finish(self) -> None:
        self._writer.close()
