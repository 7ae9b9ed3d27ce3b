"""Trainers of the engine tests: each run is a set of processes of `tests/ranks/trainer_rank.py`."""

import contextlib
import json
from pathlib import Path
from typing import Any

from benchmarks.receivers import forkserver
from tests.rank_processes import call_on_ranks
from tests.ranks import trainer_rank
from tests.zero3 import shard_everything

ROOT = Path(__file__).parents[1]
ENGINES = {
    "zero1": ("deepspeed", ["deepspeed_config=deepspeed_stage1_bf16"]),
    "zero2": ("deepspeed", ["deepspeed_config=deepspeed_stage2_bf16"]),
    "zero3": ("deepspeed", []),  # the file comes from shard_everything()
    "fsdp2": ("fsdp2", []),
    "fsdp2_shards": ("fsdp2", ["finetune.shard_gradients=true"]),
    "fsdp2_offload": (
        "fsdp2",
        ["finetune.shard_gradients=true", "finetune.cpu_offload=true", "finetune.gradient_checkpointing=selective"],
    ),
    "ddp": ("ddp", []),
}
SEVERAL_COPIES = {
    "hsdp": ("fsdp2", ["finetune.shard_ranks=2"]),
    "experts": ("fsdp2", ["finetune.expert_ranks=2", "finetune.gradient_checkpointing=true"]),
    "experts_hsdp": ("fsdp2", ["finetune.expert_ranks=2", "finetune.shard_ranks=2", "finetune.shard_gradients=true"]),
}
"""Engines for four ranks."""


def trainer_imported() -> contextlib.AbstractContextManager[None]:
    """The process that has imported the trainer, from which ranks are forked."""
    return forkserver(trainer_rank.__name__)


def run_ranks(
    out: Path, world_size: int, engine: str, model: Path, *, accelerator: str = "cpu", **job: Any
) -> list[dict[str, float]]:
    """Train with ``world_size`` processes, within ``trainer_imported``; the metrics of each step."""
    name, overrides = (ENGINES | SEVERAL_COPIES)[engine]
    overrides = [shard_everything(out.parent)] if engine == "zero3" else overrides
    job["accelerator"] = accelerator
    job |= {"engine": name, "overrides": overrides + job.pop("overrides", []), "model": str(model), "out": str(out)}
    call_on_ranks(trainer_rank.main, job, out, world_size, cuda=accelerator != "cpu")
    return json.loads(out.read_text())
