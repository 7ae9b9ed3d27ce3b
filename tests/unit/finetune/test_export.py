"""What leaves the trainer: names, merged adapters, no value head."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError
from pipelinerl.finetune import export
from pipelinerl.finetune.adapter import adapter_parameters, adapter_specs
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.export import (
    exported_parameters,
    exported_specs,
    file_numbers,
    read_value_head,
    stage_export,
    write_export,
)
from pipelinerl.finetune.model import Policy, add_adapters
from pipelinerl.finetune.rendezvous import Peers
from tests.models import make_qwen2

IDS = torch.arange(12)[None]


def make_lm(tied: bool = True) -> Qwen2ForCausalLM:
    return make_qwen2(32, hidden=8, intermediate=16, tied=tied)


def make_engine(lm: torch.nn.Module, **options: float) -> ReplicatedEngine:
    cfg = parse(
        compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", "finetune.dtype=float32"])
    )
    return ReplicatedEngine(Policy(lm, **options), cfg, torch.device("cpu"))


@pytest.mark.parametrize("tied", [True, False])
def test_exported_names_are_those_of_the_hugging_face_model_without_value_head(tied: bool) -> None:
    names = {name for name, _ in make_lm(tied).named_parameters()}
    engine = make_engine(make_lm(tied), value_loss_coef=0.5)
    assert {name for name, _ in exported_parameters(engine, torch.float32)} == names
    assert ("lm_head.weight" in names) is not tied


def test_specs_describe_the_parameters_in_their_order() -> None:
    lora = SimpleNamespace(r=2, alpha=6, dropout=0.0, target_modules="all-linear")
    engine = make_engine(add_adapters(make_lm(), lora, seed=0), lora_scaling=3.0)
    specs = [(s.name, s.dtype, s.shape) for s in exported_specs(engine, torch.bfloat16)]
    parameters = exported_parameters(engine, torch.bfloat16)
    assert specs == [(name, "bfloat16", tuple(t.shape)) for name, t in parameters]


def test_shards_are_cast_before_they_are_gathered() -> None:
    engine = make_engine(make_lm())
    halves, wholes = dict(engine.named_full_parameters(torch.bfloat16)), dict(engine.named_full_parameters())
    assert {tensor.dtype for tensor in wholes.values()} == {torch.float32}
    assert halves.keys() == wholes.keys()
    for name, half in halves.items():
        assert half.dtype == torch.bfloat16
        assert torch.equal(half, wholes[name].to(torch.bfloat16))


def test_adapters_are_merged_in_the_precision_in_which_they_are_trained() -> None:
    lora = SimpleNamespace(r=2, alpha=6, dropout=0.0, target_modules="all-linear")
    engine = make_engine(add_adapters(make_lm(), lora, seed=0), lora_scaling=3.0)
    with torch.no_grad():
        for name, parameter in engine.policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    wholes = {name: tensor.clone() for name, tensor in exported_parameters(engine, torch.float32)}
    for name, half in exported_parameters(engine, torch.bfloat16):
        assert torch.equal(half, wholes[name].to(torch.bfloat16)), name


def test_merged_adapters_give_the_adapted_models_logits(tmp_path: Path) -> None:
    lora = SimpleNamespace(r=2, alpha=6, dropout=0.0, target_modules="all-linear")
    lm = add_adapters(make_lm(), lora, seed=0)
    engine = make_engine(lm, lora_scaling=3.0)
    trained = [name for name, p in engine.policy.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
        adapted = lm(input_ids=IDS).logits

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None: ...

    folder = write_export(Peers(), tmp_path, 3, stage_export(engine, torch.float32), engine.policy.lm, Tokenizer())
    merged = AutoModelForCausalLM.from_pretrained(folder)
    base = make_lm()
    with torch.no_grad():
        assert (merged(input_ids=IDS).logits - adapted).abs().max() <= 1e-5
        assert (base(input_ids=IDS).logits - adapted).abs().max() > 1e-3
        loaded = PeftModel.from_pretrained(base, folder / "adapter")
        assert (loaded(input_ids=IDS).logits - adapted).abs().max() <= 1e-6
        greedy = [
            model.generate(input_ids=IDS, max_new_tokens=8, do_sample=False, eos_token_id=99, pad_token_id=0)
            for model in (loaded, merged)
        ]
    assert torch.equal(*greedy)


def test_servers_are_sent_the_adapter_under_pefts_names_with_the_scaling_in_b() -> None:
    lora = SimpleNamespace(r=2, alpha=6, dropout=0.0, target_modules=["q_proj", "down_proj"])
    engine = make_engine(add_adapters(make_lm(), lora, seed=0), lora_scaling=3.0, value_loss_coef=0.5)
    with torch.no_grad():
        for name, parameter in engine.policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    sent = dict(adapter_parameters(engine, torch.bfloat16))
    assert [(spec.name, spec.dtype, spec.shape) for spec in adapter_specs(engine, torch.bfloat16)] == [
        (name, "bfloat16", tuple(tensor.shape)) for name, tensor in sent.items()
    ]
    modules = [
        f"base_model.model.model.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert [*sent] == [f"{module}.lora_{kind}.weight" for module in modules for kind in "AB"]
    trained = dict(engine.policy.lm.named_parameters())
    a, b = (sent[f"{modules[3]}.lora_{kind}.weight"] for kind in "AB")
    assert torch.equal(a, trained["model.layers.1.mlp.down_proj.lora_A.default.weight"].bfloat16())
    assert torch.equal(b, torch.full((8, 2), 0.9).bfloat16()), "scaled in float32, then rounded"


def test_large_model_is_exported_in_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 1000)
    engine = make_engine(make_lm(), value_loss_coef=0.5)

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None: ...

    folder = write_export(Peers(), tmp_path, 1, stage_export(engine, torch.bfloat16), engine.policy.lm, Tokenizer())
    files = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert len(files) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    expected = dict(make_lm().named_parameters())
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in loaded.named_parameters())
    assert set(load_file(folder / "value_head.safetensors")) == {"weight", "bias"}


def test_value_head_begins_with_the_one_beside_the_model_ours_or_pipelinerls(tmp_path: Path) -> None:
    """PipelineRL saves `ValueHead.state_dict()`, a linear layer named `output`, as `value_head.pt`."""
    head = make_engine(make_lm(), value_loss_coef=0.5).policy.value_head
    assert head is not None
    width = head.in_features
    saved = {"output.weight": torch.arange(width, dtype=torch.float32)[None], "output.bias": torch.tensor([3.0])}
    torch.save(saved, tmp_path / "value_head.pt")
    for folder in (tmp_path, tmp_path / "ours"):
        engine = make_engine(make_lm(), value_loss_coef=0.5)
        read_value_head(engine.policy, folder)
        read = engine.policy.value_head
        assert read is not None
        assert torch.equal(read.weight, saved["output.weight"])
        assert torch.equal(read.bias, saved["output.bias"])
        (tmp_path / "ours").mkdir(exist_ok=True)
        save_file(dict(read.state_dict()), tmp_path / "ours" / "value_head.safetensors")
    torch.save({"output.weight": torch.zeros(1, 3), "output.bias": torch.zeros(1)}, tmp_path / "value_head.pt")
    with pytest.raises(ConfigError, match="is not a value head of this model"):
        read_value_head(engine.policy, tmp_path)
    read_value_head(make_engine(make_lm()).policy, tmp_path)  # without a head nothing is read


def test_every_tensor_is_in_one_file_and_files_close_when_full() -> None:
    assert file_numbers([("a", 6), ("b", 6), ("c", 1), ("d", 20), ("e", 1)], 10) == {
        "a": 0,
        "b": 0,
        "c": 1,
        "d": 1,
        "e": 2,
    }
