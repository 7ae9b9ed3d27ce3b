"""Where the configuration files lie. Light, so that the command line can be parsed before anything else."""

import sysconfig
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2] / "conf"
_INSTALLED = Path(sysconfig.get_path("data")) / "share" / "pipelinerl" / "conf"
CONF_DIR = _CHECKOUT if (_CHECKOUT / "base.yaml").is_file() else _INSTALLED
"""Of the checkout, also when it is installed as editable; else what came with the wheel."""
RUN_CONFIG = Path("conf") / "config.yaml"
"""Of a run folder."""
