"""One rank of a trainer that sends weights to servers.

Sends version 0, trains a step, sends version 1. Rank 0 writes the weights of the last version to `out`; every rank
writes how many bytes it has sent to `out` with the suffix `.<rank>`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.accumulate import train_step
from pipelinerl.finetune.build import make_rules
from pipelinerl.finetune.engines import read_ranks
from pipelinerl.finetune.export import exported_parameters
from pipelinerl.finetune.rl.objective import settings_at
from tests.ranks.trainer_rank import records_of
from tests.trainer_kit import sending_rank


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, world_size, _ = read_ranks("cpu")
    out = Path(job["out"])
    given = [f"output_dir={out.parent}", f"model_path={job['model']}", "dataset_loader=a.b"]
    dtype = job.get("dtype", "bfloat16")
    learning = [
        f"finetune.dtype={dtype}",
        "finetune.learning_rate=1e-2",
        "finetune.gradient_checkpointing=false",
        "weights.probe=false",
    ]
    overrides = ["actor.rollout_policy=a.b", f"finetune.engine={job['engine']}", *job["overrides"]]
    cfg = parse(compose("base", [*given, *learning, *overrides]))
    own = sending_rank(out.parent, cfg, job["urls"])
    own.updates.start(0, own.num_servers, resumed=False)
    rules = make_rules(own.engine, cfg)
    train_step(own.engine, records_of(0, rank, world_size), settings_at(cfg, 0), rules, 1e-2)
    own.updates.after_step(1, lambda: False)
    assert own.updates.finish(1)
    if own.sender is not None:
        assert own.sender.wait_live(1, 60, count=own.num_servers)
    full = exported_parameters(own.engine, torch.float32)
    weights = {name: tensor.to(getattr(torch, dtype), copy=True) for name, tensor in full}
    out.with_suffix(f".{rank}").write_text(json.dumps(own.origin.source_server.num_bytes))
    if rank == 0:
        save_file(weights, out)
    own.engine.gather_objects(None)  # no rank leaves before the servers have all
    own.close()
