"""Where the configuration files lie. Light, so that the command line can be parsed before anything else."""

from pathlib import Path

CONF_DIR = (Path(__file__).resolve().parents[1] / "conf").resolve()
"""Package data; in a checkout a link to its `conf/`."""
OWN_DIR = Path("conf")
"""Folder of the working directory whose configurations win over the packaged ones."""


def search_path(config_dir: Path | str | None = None) -> tuple[Path, ...]:
    """Folders with configurations, the one that wins first: `config_dir` or the working directory's `conf/`, ours."""
    own = Path(config_dir) if config_dir else OWN_DIR
    if own.is_dir() and own.resolve() != CONF_DIR.resolve():
        return (own.resolve(), CONF_DIR)
    return (CONF_DIR,)


def config_names(config_dir: Path | str | None = None) -> list[str]:
    """Names of all configurations on the search path."""
    return sorted({path.stem for folder in search_path(config_dir) for path in folder.glob("*.yaml")})


LOCK_FILE = "launcher.lock"
"""In the run folder; held for as long as a launcher runs there."""
RUN_CONFIG = Path("conf") / "config.yaml"
"""Of a run folder."""
RUN_ADDRESS = Path("conf") / "address"
"""Of a run folder that a role made for itself: where the run is (`pipelinerl.membership.address`)."""
