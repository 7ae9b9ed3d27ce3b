"""ZeRO-3 that shards every parameter; the shipped file leaves small ones whole, which are all of a tiny model."""

import json
from pathlib import Path

from pipelinerl.config.paths import CONF_DIR


def shard_everything(folder: Path) -> str:
    """Writes `zero3.json` into ``folder``; returns the override that names it."""
    settings = json.loads((CONF_DIR / "deepspeed" / "deepspeed_stage3_bf16.json").read_text())
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (folder / "zero3.json").write_text(json.dumps(settings))
    return f"deepspeed_config={folder / 'zero3'}"
