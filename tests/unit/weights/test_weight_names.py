"""What leaves the trainer, and under which name."""

import pytest
import torch
from torch import nn

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.names import checkpoint_name, export_plan, tied_names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.module.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.3._checkpoint_wrapped_module.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("value_head.weight", None),
        ("module.v_head.summary.bias", None),
    ],
)
def test_checkpoint_name_drops_wrappers_and_value_heads(name: str, expected: str | None) -> None:
    assert checkpoint_name(name) == expected


def test_checkpoint_name_of_an_unmerged_lora_parameter_is_refused() -> None:
    with pytest.raises(WeightUpdateError, match="unmerged LoRA"):
        checkpoint_name("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed.weight
        self.value_head = nn.Linear(3, 1)


def test_export_plan_sends_a_tied_head_once_and_casts_floats_only() -> None:
    model = Tied()
    model.register_parameter("counter", nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False))
    plan = export_plan(model.named_parameters(remove_duplicate=False), tied=tied_names(model), dtype=torch.bfloat16)
    assert [(name, spec.name, spec.dtype, spec.shape) for name, spec in plan] == [
        ("counter", "counter", "int32", (2,)),
        ("embed.weight", "embed.weight", "bfloat16", (5, 3)),
    ]
