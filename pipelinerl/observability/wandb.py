"""How a run appears in Weights & Biases: one group per run folder, one wandb run per kind of role.

Without an API key `online` becomes `offline`, decided here and said by the launcher. wandb itself is imported late.
"""

import hashlib
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pipelinerl.config.sections import WandbSection

INIT_TIMEOUT_S = 60


def effective_mode(mode: str, env: Mapping[str, str] = os.environ, home: Path | None = None) -> str:
    """`online` needs an API key, in the environment or in ~/.netrc; without one the run is recorded offline."""
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
    """Group, name and id; the id depends on folder and kind only, so a restarted role continues its run."""
    group = section.wandb_group or run_dir.resolve().name
    digest = hashlib.sha256(f"{run_dir.resolve()}/{kind}".encode()).hexdigest()[:16]
    return {"group": group, "name": f"{section.wandb_name or group}_{kind}", "id": digest}


def start(section: WandbSection, run_dir: Path, kind: str) -> Any:
    """Start (or continue) the wandb run of this kind of role."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")
    import wandb

    identity = run_identity(section, run_dir, kind)
    mode = cast(Literal["online", "offline", "disabled"], effective_mode(section.mode))
    run = wandb.init(
        mode=mode,
        project=section.wandb_project_name,
        entity=section.wandb_entity_name,
        job_type=kind,
        tags=section.tags,
        dir=str(run_dir),
        resume="allow" if mode == "online" else None,
        settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, x_disable_stats=True, x_disable_meta=True),
        group=identity["group"],
        name=identity["name"],
        id=identity["id"],
    )
    run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
    return run
