"""Trainers of the engine tests: each run is a set of processes of `tests/ranks/trainer_rank.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.zero3 import shard_everything

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "ranks" / "trainer_rank.py"  # imports `benchmarks`, which is not installed
TIMEOUT_S = 240
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


def run_ranks(
    out: Path, world_size: int, engine: str, model: Path, *, accelerator: str = "cpu", **job: Any
) -> list[dict[str, float]]:
    """Train with ``world_size`` processes; the metrics of each step."""
    name, overrides = (ENGINES | SEVERAL_COPIES)[engine]
    overrides = [shard_everything(out.parent)] if engine == "zero3" else overrides
    job["accelerator"] = accelerator
    job |= {"engine": name, "overrides": overrides + job.pop("overrides", []), "model": str(model), "out": str(out)}
    port = free_port()
    logs = [out.with_suffix(f".rank{rank}.log") for rank in range(world_size)]
    processes = []
    for rank, path in enumerate(logs):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if accelerator == "cpu" else {}),
            "PYTHONPATH": str(ROOT),
        }
        log = path.open("w")
        arguments = [sys.executable, str(SCRIPT), json.dumps(job)]
        processes.append((subprocess.Popen(arguments, env=env, stdout=log, stderr=subprocess.STDOUT), log))
    try:
        codes = [process.wait(TIMEOUT_S) for process, _ in processes]
    finally:
        for process, log in processes:
            process.kill()
            process.wait()
            log.close()
    assert codes == [0] * world_size, "\n".join(path.read_text()[-4000:] for path in logs)
    return json.loads(out.read_text())
