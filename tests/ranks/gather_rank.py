"""One rank that gathers the parameters of a sharded engine. It fails where one is not the whole tensor."""

from typing import Any

import torch

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.build import make_engine
from pipelinerl.finetune.engines import read_ranks


def main(job: dict[str, Any]) -> None:
    _, world_size, device = read_ranks("cpu")
    given = ["output_dir=unused", f"model_path={job['model']}", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    engine = make_engine(parse(compose("base", [*given, "finetune.engine=fsdp2"])), device, world_size)
    rows = {len(parameter) for parameter in engine.policy.parameters()}
    assert any(count % world_size for count in rows)
    assert min(rows) < world_size
    for dtype in (torch.bfloat16, None):
        full = {name: tensor.clone() for name, tensor in engine.named_full_parameters(dtype)}
        assert [(name, tuple(tensor.shape)) for name, tensor in full.items()] == engine.full_shapes()
        for name, parameter in engine.policy.named_parameters():
            assert torch.equal(full[name], parameter.detach().full_tensor().to(dtype or parameter.dtype)), name  # type: ignore[attr-defined]
    engine.close()
