"""A run in trackio, under the names that it has in wandb. trackio keeps its data in `TRACKIO_DIR`.

    trackio show --project pipeline-rl

`TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` send it elsewhere.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config.sections import Config
from pipelinerl.observability.wandb import run_identity


class TrackioTracker:
    """One kind of role's trackio run."""

    def __init__(self, cfg: Config, run_dir: Path, kind: str):
        import trackio

        identity = run_identity(cfg.wandb, run_dir, kind)
        self._trackio = trackio
        self._run = trackio.init(
            project=cfg.wandb.wandb_project_name,
            name=identity["name"],
            group=identity["group"],
            config=cfg.model_dump(mode="json"),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, point: Mapping[str, float], step: int) -> None:
        self._run.log(dict(point), step=step)

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title=title, text=text)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        data = [list(row) for row in rows]
        self._run.log({name: self._trackio.Table(columns=list(columns), data=data)}, step=step)

    def keep(self, path: Path) -> None: ...

    def finish(self) -> None:
        self._run.finish()
