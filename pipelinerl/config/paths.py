"""Where the configuration files lie. Imports nothing, so that the command line can be parsed before anything else."""

from pathlib import Path

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
RUN_CONFIG = Path("conf") / "config.yaml"
"""Of a run folder."""
