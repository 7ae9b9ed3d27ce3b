"""A model streamed into an engine holds the very numbers that a whole load gives, and reads only its ranges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.checkpoint_names import CheckpointNames
from pipelinerl.finetune.engines import replicated
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.loading import WeightFiles, load_model, stream_weights
from pipelinerl.finetune.model import Policy, Tokens, empty_lm, is_empty, load_lm, narrow_frozen
from pipelinerl.finetune.small_copy import small_copy
from tests.models import make_qwen2, save_qwen2
from tests.says import says

CPU = torch.device("cpu")


def make_config(model: Path, *overrides: str) -> Config:
    required = ["output_dir=x", f"model_path={model}", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    return parse(compose("base", [*required, *overrides]))


@pytest.mark.parametrize("lora", ["true", "false"])
@pytest.mark.parametrize("tied", [True, False])
def test_streamed_model_equals_the_whole_load_to_the_bit(tmp_path: Path, tied: bool, lora: str) -> None:
    model = save_qwen2(tmp_path / "model", 32, tied=tied)
    cfg = make_config(model, f"finetune.lora.enabled={lora}", "finetune.dtype=float32")
    lm, files = load_model(cfg, "sdpa")
    assert files is not None
    assert is_empty(lm)
    engine = ReplicatedEngine(Policy(lm, value_loss_coef=0.5), cfg, CPU)
    stream_weights(engine, files)

    whole = Policy(load_lm(cfg.model_path, cfg, "sdpa"), value_loss_coef=0.5)
    ours, expected = dict(engine.policy.named_parameters()), dict(whole.named_parameters())
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    buffers = dict(engine.policy.named_buffers())
    assert all(torch.equal(buffers[name], values) for name, values in whole.named_buffers())
    ids, positions = torch.arange(9)[None], torch.arange(9)[None]
    tokens = Tokens(ids, positions)
    assert torch.equal(engine.policy.hidden_states(tokens), whole.hidden_states(tokens))
    assert [p.requires_grad for p in ours.values()] == [p.requires_grad for p in expected.values()]
    assert engine.policy.lm.generation_config.to_dict() == whole.lm.generation_config.to_dict()


def test_base_in_bfloat16_gives_the_very_states_that_autocast_gives(tmp_path: Path, monkeypatch: Any) -> None:
    states, held = [], []
    cfg = make_config(save_qwen2(tmp_path, 32), "finetune.lora.enabled=true")
    for narrow in (narrow_frozen, lambda lm, dtype: None):
        monkeypatch.setattr(replicated, "narrow_frozen", narrow)
        engine = ReplicatedEngine(Policy(load_lm(cfg.model_path, cfg, "sdpa")), cfg, CPU)
        held.append({parameter.dtype for parameter in engine.policy.parameters()})
        states.append(engine.evaluate(Tokens(torch.arange(9)[None], torch.arange(9)[None])))
    assert held == [{torch.bfloat16, torch.float32}, {torch.float32}]
    assert torch.equal(*states)


def test_bfloat16_files_become_float32_weights(tmp_path: Path) -> None:
    make_qwen2(32).bfloat16().save_pretrained(tmp_path)
    cfg = make_config(tmp_path)
    files = WeightFiles.find(str(tmp_path))
    assert files is not None
    engine = ReplicatedEngine(Policy(empty_lm(tmp_path, cfg, "sdpa")), cfg, CPU)
    stream_weights(engine, files)
    weight = engine.policy.get_parameter("lm.model.norm.weight")
    assert weight.dtype == torch.float32
    embedding = engine.policy.get_parameter("lm.model.embed_tokens.weight")
    assert torch.equal(embedding, make_qwen2(32).get_parameter("model.embed_tokens.weight").bfloat16().float())


@pytest.mark.parametrize(("start", "count"), [(0, 12), (0, 1), (5, 3), (3, 9), (11, 1), (4, 4)])
def test_any_range_of_a_flattened_tensor_is_read(tmp_path: Path, start: int, count: int) -> None:
    save_file({"m": torch.arange(12.0).view(4, 3), "v": torch.arange(12.0)}, tmp_path / "model.safetensors")
    files = WeightFiles(dict.fromkeys(("m", "v"), tmp_path / "model.safetensors"))
    wanted = list(range(start, start + count))
    assert files.read("m", start, count).tolist() == wanted
    assert files.read("v", start, count).tolist() == wanted


def test_model_in_several_files_is_found_by_its_index(tmp_path: Path) -> None:
    lm = make_qwen2(32)
    lm.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    files = WeightFiles.find(str(tmp_path))
    assert files is not None
    assert files.lacking(lm) == []


@pytest.mark.parametrize("damage", ["other shape", "no safetensors", "asked for"])
def test_what_cannot_be_streamed_is_loaded_whole(tmp_path: Path, damage: str) -> None:
    model = save_qwen2(tmp_path / "model", 32)
    cfg = make_config(model)
    path = model / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in make_qwen2(32).named_parameters()}
    if damage == "other shape":
        weights["model.norm.weight"] = weights["model.norm.weight"][None]
        save_file(weights, path)
        files = WeightFiles.find(str(model))
        assert files is not None
        assert files.lacking(make_qwen2(32)) == ["model.norm.weight"]
        return
    if damage == "no safetensors":
        path.unlink()
        torch.save(weights, model / "pytorch_model.bin")
    lm, found = load_model(cfg, "sdpa", whole=damage == "asked for")
    assert found is None
    assert not is_empty(lm)
    assert {parameter.dtype for parameter in lm.parameters()} == {
        torch.bfloat16 if damage == "asked for" else torch.float32
    }


@pytest.mark.parametrize("lora", ["true", "false"])
@pytest.mark.parametrize("tied", [True, False])
def test_files_that_lack_a_tensor_are_refused_by_its_name(tmp_path: Path, lora: str, tied: bool) -> None:
    """transformers would train random values in its place, and other ones on every rank."""
    model = save_qwen2(tmp_path / "model", 32, tied=tied)
    gone = "model.norm.weight" if tied else "lm_head.weight"
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if name != gone}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=says(tmp_path / "model", "lack", 1, f"['{gone}']")):
        load_model(make_config(model, f"finetune.lora.enabled={lora}"), "sdpa")


@pytest.mark.parametrize("damage", ["cut", "not in the file"])
@pytest.mark.parametrize("files", [1, 2])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str, files: int) -> None:
    make_qwen2(32).save_pretrained(tmp_path, max_shard_size="1GB" if files == 1 else "8KB")
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        save_file({"other": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match=path.name if damage == "cut" or files == 2 else "lack"):
        load_model(make_config(tmp_path), "sdpa")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_experts_are_streamed_from_the_tensors_of_each_expert(tmp_path: Path, model_type: str) -> None:
    """Any range of a layer's experts, which are one parameter here, and the bias of their choice, which is a buffer."""
    lm = small_copy(AutoConfig.for_model(model_type)).lm
    for _, buffer in CheckpointNames(lm).buffers():
        buffer.normal_()
    lm.save_pretrained(tmp_path, max_shard_size="200KB")
    cfg = make_config(tmp_path)
    empty, files = load_model(cfg, "sdpa")
    assert files is not None
    engine = ReplicatedEngine(Policy(empty), cfg, CPU)
    stream_weights(engine, files)
    found = dict(engine.policy.lm.state_dict())
    assert all(torch.equal(found[name], values) for name, values in lm.state_dict().items())

    [(name, experts), *_] = [(n, p) for n, p in lm.named_parameters() if n.endswith("experts.gate_up_proj")]
    blocks, one = engine.policy.names.blocks(name, tuple(experts.shape)), experts[0].numel()
    for start, count in ((0, experts.numel()), (one // 2 - 3, 7), (one - 1, 2 * one), (experts.numel() - 1, 1)):
        values = files.read_range(blocks, start, count)
        assert torch.equal(values, experts.detach().flatten()[start : start + count])


def test_files_without_one_expert_are_loaded_whole(tmp_path: Path) -> None:
    lm = small_copy(AutoConfig.for_model("qwen3_moe")).lm
    lm.save_pretrained(tmp_path)
    files = WeightFiles.find(str(tmp_path))
    assert files is not None
    assert files.lacking(lm) == []
    del files._files["model.layers.1.mlp.experts.3.up_proj.weight"]  # type: ignore[attr-defined]
    assert files.lacking(lm) == ["model.layers.1.mlp.experts.gate_up_proj"]
