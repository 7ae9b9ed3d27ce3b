"""A run in Weights & Biases: one group per run folder, one wandb run per kind of role.

Without an API key `online` becomes `offline`, and the launcher warns of it.
"""

import hashlib
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pipelinerl.config.origin import named_folder
from pipelinerl.config.rules.machines import WANDB_CHARS, WANDB_ROLE_CHARS
from pipelinerl.config.sections import Config, WandbSection

INIT_TIMEOUT_S = 60
"""wandb's server may be slow. The tracker's thread waits, not the role."""
MODE_VARIABLE = "WANDB_MODE"
MODES = ("disabled", "offline", "online")
"""Ordered by how much they send."""
OLD_MODES = {"run": "online", "dryrun": "offline"}


def effective_mode(mode: str, env: Mapping[str, str] = os.environ, home: Path | None = None) -> str:
    """Return which of `mode` (`wandb.mode`) and `WANDB_MODE` sends less. `online` is `offline` without an API key.

    Args:
        env: may have the key, else ~/.netrc does.
        home: folder of `.netrc`. None = the user's.
    """
    given = env.get(MODE_VARIABLE, "").lower() or mode
    mode = min(mode, OLD_MODES.get(given, given), key=MODES.index)
    if mode != "online" or env.get("WANDB_API_KEY"):
        return mode
    return "online" if _netrc_has_key(env, home or Path.home()) else "offline"


def _netrc_has_key(env: Mapping[str, str], home: Path) -> bool:
    path = Path(env.get("NETRC", home / ".netrc"))
    host = env.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def run_identity(section: WandbSection, run_dir: Path, kind: str) -> dict[str, str]:
    """Return group, name and id. A restarted role has the same id, and two folders called `run1` different groups."""
    folder = named_folder(run_dir)
    place = f"{folder.parent.name}-{folder.name}"[: WANDB_CHARS - WANDB_ROLE_CHARS - 7]
    group = section.wandb_group or f"{place}-{_digest(str(folder))[:6]}".lstrip("-")
    return {
        "group": group,
        "name": f"{section.wandb_name or group[: WANDB_CHARS - WANDB_ROLE_CHARS]}_{kind}",
        "id": _digest(f"{folder}/{kind}")[:16],
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def start_run(cfg: Config, run_dir: Path, kind: str) -> Any:
    """Start or continue the wandb run of this kind of role, with the run's configuration.

    Only the trainer's run records statistics of its host.
    """
    section = cfg.wandb
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")
    import wandb

    identity = run_identity(section, run_dir, kind)
    mode = cast(Literal["online", "offline", "disabled"], effective_mode(section.mode))
    os.environ[MODE_VARIABLE] = mode  # wandb reads the variable, too, in lower case only
    run = wandb.init(
        mode=mode,
        project=section.wandb_project_name,
        entity=section.wandb_entity_name,
        job_type=kind,
        tags=section.tags,
        dir=str(run_dir),
        resume="allow" if mode == "online" else None,
        settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, x_disable_stats=kind != "finetune", x_disable_meta=True),
        config=cfg.model_dump(mode="json"),
        group=identity["group"],
        name=identity["name"],
        id=identity["id"],
    )
    run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
    return run


class WandbTracker:
    """One kind of role's wandb run."""

    def __init__(self, cfg: Config, run_dir: Path, kind: str):
        self._run = start_run(cfg, run_dir, kind)
        self._kind = kind

    def log(self, point: Mapping[str, float], step: int) -> None:
        self._run.log({**point, f"{self._kind}/step": step})

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title=title, text=text)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        import wandb

        data = [list(row) for row in rows]
        self._run.log({name: wandb.Table(columns=list(columns), data=data), f"{self._kind}/step": step})

    def keep(self, path: Path) -> None:
        import wandb

        artefact = wandb.Artifact(f"{path.stem}-{self._run.id}", type=path.stem)
        artefact.add_file(str(path))
        self._run.log_artifact(artefact)

    def finish(self) -> None:
        self._run.finish()
