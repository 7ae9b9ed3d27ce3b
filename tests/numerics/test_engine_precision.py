"""bfloat16 narrows the model, never the constants of the loss."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune import model
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.engines import build_engine
from pipelinerl.finetune.engines.experts import EXPERTS
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.finetune.small_copy import small_copy
from tests.models import make_qwen2

CPU = torch.device("cpu")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback"}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "qwen3_next")
SLOW_MIXTURES = ("jamba", "nemotron_h")


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


class Products(TorchDispatchMode):
    """Data types of the matrix products that are computed inside these modules, below autocast."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        super().__init__()
        self.dtypes, self._inside = set[torch.dtype](), 0
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._enter(1))
            module.register_forward_hook(lambda *_: self._enter(-1))

    def _enter(self, step: int) -> None:
        self._inside += step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._inside and func.overloadpacket.__name__ in PRODUCTS:
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize("model_type", [*MIXTURES, *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW_MIXTURES)])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_bfloat16_engine_multiplies_experts_in_bfloat16(name: str, model_type: str, one_rank: None) -> None:
    """A small copy of every mixture that the trainer is tested with. DeepSpeed: tests/integration."""
    required = ["output_dir=unused", "model_path=unused", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    cfg = parse(compose("base", [*required, "finetune.dtype=bfloat16"]))
    lm = small_copy(AutoConfig.for_model(model_type)).lm
    experts = [module for name, module in lm.named_modules() if name.rpartition(".")[2] == EXPERTS]
    engine = build_engine(name, model.Policy(lm, chunk=16), cfg, CPU)
    rules = BatchRules(vocab_size=64, max_lag_steps=None, layout="packed", tokens_per_attention_unit=0)
    batch = prepare_batch(pack(make_samples(0, 1, vocab_size=64, lengths=(5, 9)), [range(1)])[0], rules, CPU)
    with Products(experts) as products:
        engine.forward(batch, LossSettings())
    assert products.dtypes == {torch.bfloat16}
