"""Learns the shards of real vLLM models at tensor-parallel size 4, without an engine, and loads from them.

    python -m tests.recorded_loaders OUTPUT FOLDER…        # a line of JSON per model and worker

Runs in a process of its own: it makes vLLM believe that this is one worker of four.
"""

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.load.live_check import learn
from pipelinerl.weights.load.shadow_copy import bare_model
from pipelinerl.weights.transfer.shard import Shard, ShardViews, gather_runs

SIZE = 4


def be(rank: int) -> None:
    for name in ("_TP", "_PP", "_DP", "_PCP", "_DCP", "_EP"):
        number, size = (rank, SIZE) if name == "_TP" else (0, 1)
        group = {"world_size": size, "rank_in_group": number, "rank": number, "ranks": list(range(size))}
        group |= {"is_first_rank": number == 0, "is_last_rank": number == size - 1}
        process_group = SimpleNamespace(rank=partial(int, number), size=partial(int, size))
        setattr(parallel_state, name, SimpleNamespace(**group, device_group=process_group, cpu_group=process_group))


@torch.no_grad()
def loaded(config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    model = bare_model(config)
    made = {id(parameter): materialize_meta_tensor(parameter).zero_() for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
    model.load_weights(weights)
    return dict(model.named_parameters())


def measure(config: Any, weights: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    layout = Layout(tuple(spec_of(*item) for item in weights.items()))
    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, whole).fill(weights.items())
    model = bare_model(config)
    plan = learn(model, model.load_weights, layout.specs)
    shard = Shard.of(layout, plan, [0])
    buffer = gather_runs(shard.stripes[0], whole, 0, 0, shard.num_bytes)
    ours, theirs = loaded(config, ShardViews(shard, buffer).items()), loaded(config, weights.items())
    return {
        "rank": rank,
        "parameters": sum(parameter.nbytes for parameter in theirs.values()),
        "shard": shard.num_bytes,
        "of": layout.num_bytes,
        "whole": shard.whole,
        "unlearned": plan.unlearned,
        "differing": [name for name in theirs if not torch.equal(ours[name], theirs[name])],
    }


def main() -> None:
    with open(sys.argv[1], "w") as output:
        for folder in map(Path, sys.argv[2:]):
            weights = load_file(folder / "model.safetensors")
            arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="float32")
            config = arguments.create_engine_config()
            for rank in range(SIZE):
                be(rank)
                with set_current_vllm_config(config):
                    print(json.dumps({"model": folder.name} | measure(config, weights, rank)), file=output)


if __name__ == "__main__":
    main()
