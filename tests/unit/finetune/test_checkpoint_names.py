"""What servers and exported folders get has the names, shapes and values of the model's checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.checkpoint_names import CheckpointNames
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.export import exported_parameters, exported_specs
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.small_copy import small_copy
from pipelinerl.weights.layout import spec_of
from tests.says import says

EXPERTS = {
    "qwen2_moe": "model.layers.0.mlp.experts.5.gate_proj.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.5.gate_proj.weight",
    "olmoe": "model.layers.0.mlp.experts.5.up_proj.weight",
    "mixtral": "model.layers.0.block_sparse_moe.experts.5.w3.weight",
    "deepseek_v3": "model.layers.3.mlp.experts.5.up_proj.weight",
    "glm4_moe": "model.layers.1.mlp.experts.5.gate_proj.weight",
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj",
}
"""A tensor of the published checkpoints of each family."""


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def make_engine(lm: nn.Module) -> ReplicatedEngine:
    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]))
    return ReplicatedEngine(Policy(lm), cfg, torch.device("cpu"))


@pytest.mark.parametrize("model_type", [*EXPERTS, "gemma3", "qwen3"])
def test_exported_tensors_are_those_of_the_checkpoint(tmp_path: Path, model_type: str) -> None:
    lm = small_copy(AutoConfig.for_model(model_type)).lm
    for _, buffer in CheckpointNames(lm).buffers():
        buffer.normal_()
    lm.save_pretrained(tmp_path)
    expected, engine = saved(tmp_path), make_engine(lm)
    found = list(exported_parameters(engine, torch.float32))
    assert {name: tuple(tensor.shape) for name, tensor in found} == {n: tuple(t.shape) for n, t in expected.items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found)
    assert EXPERTS.get(model_type, found[0][0]) in expected

    expected_specs = [spec_of(name, tensor) for name, tensor in exported_parameters(engine, torch.bfloat16)]
    assert list(exported_specs(engine, torch.bfloat16)) == expected_specs


def test_bias_of_the_choice_of_experts_is_exported_in_float32(tmp_path: Path) -> None:
    """A rounded bias would choose other experts in the server than in the trainer."""
    engine = make_engine(small_copy(AutoConfig.for_model("deepseek_v3")).lm)
    kinds = {spec.name: spec.dtype for spec in exported_specs(engine, torch.bfloat16)}
    assert kinds.pop("model.layers.3.mlp.gate.e_score_correction_bias") == "float32"
    assert set(kinds.values()) == {"bfloat16"}


@pytest.mark.parametrize("damage", ["computed", "incomplete"])
def test_conversion_that_is_no_division_into_blocks_is_refused(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    lm = small_copy(AutoConfig.for_model("qwen3")).lm

    def convert(_: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor * 2 if damage == "computed" else tensor[:1] for name, tensor in tensors.items()}

    monkeypatch.setattr("pipelinerl.finetune.checkpoint_names.revert_weight_conversion", convert)
    with pytest.raises(ConfigError, match=says("Qwen3ForCausalLM's", "lm_head.weight")):
        CheckpointNames(lm).blocks("lm_head.weight", (256, 64))
