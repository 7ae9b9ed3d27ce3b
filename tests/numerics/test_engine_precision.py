"""bfloat16 narrows the model, never the constants of the loss."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune import model
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.engines import build_engine
from pipelinerl.finetune.rl.objective import LossSettings
from tests.models import make_qwen2

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    hook = sys.excepthook  # which torch replaces
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_bfloat16_engine_takes_advantages_and_log_probabilities_in_float32(
    name: str, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    required = ["output_dir=unused", "model_path=unused", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    cfg = parse(compose("base", [*required, "finetune.dtype=bfloat16"]))
    engine = build_engine(name, model.Policy(make_qwen2(64), chunk=16), cfg, CPU)
    objectives: list[Any] = []
    plain = model.head_loss

    def head_loss(head: Any, hidden_KH: torch.Tensor, targets_K: torch.Tensor, objective: Any, **options: Any) -> Any:
        objectives.append((hidden_KH.dtype, objective.inputs))
        return plain(head, hidden_KH, targets_K, objective, **options)

    monkeypatch.setattr(model, "head_loss", head_loss)
    rules = BatchRules(vocab_size=64, max_lag_steps=None, layout="packed", tokens_per_attention_unit=0)
    batch = prepare_batch(pack(make_samples(0, 4, vocab_size=64, lengths=(5, 9)), [range(4)])[0], rules, CPU)
    engine.forward(batch, LossSettings(kl_coef=0.1))
    ((states, seen),) = objectives
    for field in ("sampler_logprobs_K", "advantages_K", "weights_K", "ref_logprobs_K"):
        assert getattr(seen, field).dtype == torch.float32, field
        assert torch.equal(getattr(seen, field), getattr(batch.inputs, field)), field
    assert name == "ddp" or states == torch.bfloat16
