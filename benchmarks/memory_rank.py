"""One rank that loads a model into an engine and measures its memory, run as a process by `memory.py` and tests.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python memory_rank.py '{"engine": "fsdp2", "model": …}'

Writes to `out` on every rank: anonymous memory before, at its peak, and after, in bytes.
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.build import load_engine, make_engine
from pipelinerl.finetune.engines import join_ranks, read_ranks
from pipelinerl.membership.role import leave
from pipelinerl.world.process import return_freed_heap

SAMPLE_S = 0.001


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: pages of a mapped checkpoint are the kernel's to give back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


class Peak(threading.Thread):
    """Samples the memory until stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self._stop_asked = 0, threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(SAMPLE_S):
            self.bytes = max(self.bytes, anonymous_bytes())

    def stop(self) -> int:
        self._stop_asked.set()
        self.join()
        return max(self.bytes, anonymous_bytes())


def anonymous_after_collection() -> int:
    gc.collect()
    return_freed_heap()
    return anonymous_bytes()


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, world_size, device = read_ranks("cpu")
    cfg = parse(
        compose(
            "base",
            [
                "output_dir=unused",
                f"model_path={job['model']}",
                "dataset_loader=a.b",
                "actor.rollout_policy=a.b",
                f"finetune.engine={job['engine']}",
                *job["overrides"],
            ],
        )
    )
    join_ranks(job["engine"], world_size, device, 300)
    make_engine(warm_up(cfg, job["warm_up"]), device, world_size)
    before = anonymous_after_collection()
    peak = Peak()
    peak.start()
    engine = load_engine(cfg, device, world_size)
    highest, after = peak.stop(), anonymous_after_collection()
    held = sum(piece.num_bytes for piece in engine.pieces().values())
    numbers = {"before": before, "peak": highest, "after": after, "pieces": held}
    Path(f"{job['out']}.{rank}").write_text(json.dumps(numbers))
    if dist.is_initialized():
        dist.barrier()


def warm_up(cfg: Any, model: str) -> Any:
    """The same configuration for a model so small that loading it costs imports and nothing else."""
    engine = cfg.finetune.engine
    if engine == "deepspeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        engine = "ddp"
    finetune = cfg.finetune.model_copy(update={"engine": engine})
    return cfg.model_copy(update={"model_path": model, "finetune": finetune})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os.environ.pop("RANK", None)
    leave(0)
