"""Where the configuration files lie, and what a run folder holds. Light: the command line is parsed with it."""

import re
from pathlib import Path

CONF_DIR = (Path(__file__).resolve().parents[1] / "conf").resolve()
"""Package data; in a checkout a link to its `conf/`."""
EXAMPLES_DIR = CONF_DIR.parent / "examples"
"""Exists in a checkout alone. Its folders hold a task each: configuration and domain."""
OWN_DIR = Path("conf")
"""Folder of the working directory whose configurations win over the packaged ones."""


def search_path(config_dir: Path | str | None = None, *, own: bool = True) -> tuple[Path, ...]:
    """Folders with configurations, the one that wins first.

    `config_dir`, or the working directory's `conf/` where `own`; the packaged folder; in a checkout the examples.
    """
    first = Path(config_dir) if config_dir else OWN_DIR
    folders = (CONF_DIR, *sorted({path.parent for path in EXAMPLES_DIR.glob("*/*.yaml")}))
    if (own or config_dir) and first.is_dir() and first.resolve() != CONF_DIR:
        return (first.resolve(), *folders)
    return folders


def config_names(config_dir: Path | str | None = None) -> list[str]:
    """Names of all configurations on the search path."""
    return sorted({path.stem for folder in search_path(config_dir) for path in folder.glob("*.yaml")})


LOCK_FILE = "launcher.lock"
"""In the run folder; held for as long as a launcher runs there."""
RUN_CONFIG = Path("conf") / "config.yaml"
"""The run's resolved configuration, in its folder."""
RUN_ORIGIN = Path("conf") / "origin.json"
"""Where the run was made (`pipelinerl.config.origin`), in its folder."""
RUN_ADDRESS = Path("conf") / "address"
"""Where the run is (`pipelinerl.membership.address`), in the folder that a role elsewhere made for itself."""
METRICS, CHECKPOINTS, EXPORTS, PROFILES = "metrics", "checkpoints", "exports", "profiles"
"""Folders of a run folder that several commands read."""
SUMMARY_FILE, CURVE_FILE = "summary.json", "learning_curve.png"
DEBUG_RUN_FILE, ENDING_FILE = "alone.json", "ending.json"
REPORT_FILE, TIMELINE_FILE = "report.html", "timeline.json"
"""Files of a run folder for people."""


def metrics_file(run_dir: Path | str, kind: str) -> Path:
    """The metrics of one kind of role, e.g. `finetune`."""
    return Path(run_dir) / METRICS / f"{kind}.jsonl"


def exports(run_dir: Path) -> dict[int, Path]:
    """The folders with the run's models for servers, by optimizer step."""
    steps = {path.name.removeprefix("step_"): path for path in (run_dir / EXPORTS).glob("step_*")}
    return {int(step): path for step, path in steps.items() if step.isdecimal()}


def newest_export(run_dir: Path) -> Path | None:
    """The folder with the run's newest model for servers. None: it has none yet."""
    found = exports(run_dir)
    return found[max(found)] if found else None


def weight_store(store: str | None, run_dir: Path) -> str:
    """Returns the absolute folder or the URL of `weights.store`: by default in the run folder."""
    url = str(run_dir / "weights" / "store") if store is None else store.removeprefix("file://")
    return url if "://" in url else str(Path(url).absolute())


def without_credentials(url: str) -> str:
    """Returns the URL without the user and password that some file systems take in it."""
    return re.sub(r"//[^/@]*@", "//", url)
