"""How engines begin: the group that ranks join, the optimizer states that DeepSpeed is given."""

import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipelinerl.finetune import engines
from pipelinerl.finetune.engines import join_ranks
from pipelinerl.finetune.engines.zero import ZeroEngine

CHECK = "_device_dtype_check_for_fused"


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_ranks_wait_for_each_other_as_long_as_the_run_allows(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(engines, "open_rendezvous", lambda *arguments: arguments)
    monkeypatch.setattr(engines, "_stores", [])
    monkeypatch.setenv("RANK", "1")
    join_ranks("deepspeed", 2, torch.device(device), timeout_s=1800)
    timeout = timedelta(seconds=1800)
    assert calls == [((backend,), {"store": (1, 2, 1800), "rank": 1, "world_size": 2, "timeout": timeout})]


@pytest.mark.parametrize("stage", [2, 3])
def test_states_made_for_deepspeed_lie_where_torch_would_put_them(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused step reads its counter on the device of the parameter; `meta` stands for a GPU."""
    flat = torch.empty(4, device="meta", requires_grad=True)
    flat.grad = torch.empty(4, device="meta")
    monkeypatch.setattr(sys.modules[torch.optim.AdamW._init_group.__module__], CHECK, lambda parameter: None)
    inner = torch.optim.AdamW([flat], fused=True)
    inner._init_group(inner.param_groups[0], [], [], [], [], [], [])
    wanted = {name: (value.device, value.dtype, value.shape) for name, value in inner.state[flat].items()}
    zero = SimpleNamespace(
        optimizer=SimpleNamespace(state={}),
        fp32_partitioned_groups_flat=[flat],
        single_partition_of_fp32_groups=[flat],
        _lazy_init_hp_params_optimizer_state=lambda: None,
    )
    engine = ZeroEngine.__new__(ZeroEngine)
    engine.stage, engine.engine = stage, SimpleNamespace(optimizer=zero)
    engine._create_moments()
    made = zero.optimizer.state[flat]
    assert {name: (value.device, value.dtype, value.shape) for name, value in made.items()} == wanted
