"""The trainer's engine: what `finetune.engine`, `use_fsdp` and `use_deepspeed` mean for a number of ranks."""

import json
from pathlib import Path
from typing import Any

from pipelinerl.config.paths import CONF_DIR
from pipelinerl.config.sections import Config

ADAMW = "adamw"
"""The built-in optimizer, the only one that DeepSpeed shards."""


def engine_of(config: Config, ranks: int) -> str:
    """Returns `ddp`, `deepspeed` or `fsdp2`. One rank needs neither of the last two."""
    if config.finetune.engine != "auto":
        return config.finetune.engine
    if ranks == 1:
        return "ddp"
    return "fsdp2" if config.use_fsdp else "deepspeed" if config.use_deepspeed else "ddp"


def deepspeed_file(config: Config) -> Path:
    """Returns the file that `deepspeed_config` names. An absolute path stays absolute."""
    return CONF_DIR / "deepspeed" / f"{config.deepspeed_config}.json"


def zero_settings(config: Config) -> dict[str, Any]:
    """`zero_optimization` of the DeepSpeed file; empty where it does not exist."""
    path = deepspeed_file(config)
    return json.loads(path.read_text()).get("zero_optimization", {}) if path.is_file() else {}


def zero_stage(config: Config) -> int:
    """Returns the ZeRO stage in the DeepSpeed file. 0 if the file does not exist or names no stage."""
    return int(zero_settings(config).get("stage", 0))
