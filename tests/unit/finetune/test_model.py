"""The policy's model as it is loaded for training."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import LoraSection
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.model import add_adapters, decoder_layers, load_lm, narrow_frozen, turn_dropout_off
from tests.models import make_family, make_qwen2, save_qwen2


def test_dropout_is_off_in_training_whatever_the_configuration_says() -> None:
    """GPT-2 has 0.1 in attention, residuals and embeddings: log-probs of training and evaluation differed by .03."""
    torch.manual_seed(0)
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)).train()
    ids = torch.arange(12)[None]
    assert (lm(ids).logits - lm(ids).logits).abs().max() > 1e-3
    turn_dropout_off(lm)
    trained = lm.train()(ids).logits
    assert torch.equal(trained, lm(ids).logits)
    assert (trained - lm.eval()(ids).logits).abs().max() <= 1e-6


def test_attention_dropout_given_as_a_number_is_off_too() -> None:
    lm = make_qwen2(32, attention_dropout=0.5, attn_implementation="eager").train()
    ids = torch.arange(12)[None]
    assert (lm(ids).logits - lm(ids).logits).abs().max() > 1e-3
    turn_dropout_off(lm)
    assert torch.equal(lm(ids).logits, lm(ids).logits)


@pytest.mark.parametrize("modules", [["q_proj", "lm_head"], r".*(q_proj|lm_head)"])
def test_adapters_on_the_output_head_are_refused(modules: list[str] | str) -> None:
    pytest.importorskip("peft")
    lora = LoraSection(enabled=True, send="merged", r=2, alpha=2, dropout=0.0, target_modules=modules)
    with pytest.raises(ConfigError, match=r"target_modules.*output head"):
        add_adapters(make_qwen2(32, tied=False), lora, seed=0)


def test_adapters_on_the_embedding_are_refused() -> None:
    """They have another form, which would be lost where adapters are merged for servers."""
    pytest.importorskip("peft")
    lora = LoraSection(
        enabled=True, send="merged", r=2, alpha=2, dropout=0.0, target_modules=["q_proj", "embed_tokens"]
    )
    with pytest.raises(ConfigError, match=r"target_modules.*embed_tokens"):
        add_adapters(make_qwen2(32, tied=False), lora, seed=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # peft's, about its own patterns for experts
def test_adapters_of_experts_are_refused() -> None:
    """peft's all-linear also adapts the tensors that hold all experts of a layer."""
    pytest.importorskip("peft")
    lora = LoraSection(enabled=True, send="merged", r=2, alpha=2, dropout=0.0, target_modules="all-linear")
    with pytest.raises(ConfigError, match=r"target_modules.*experts"):
        add_adapters(make_family("qwen3_moe"), lora, seed=0)


def test_adapters_of_a_seed_have_the_same_values_whatever_was_drawn_before() -> None:
    pytest.importorskip("peft")
    lora = LoraSection(enabled=True, send="merged", r=4, alpha=2, dropout=0.0, target_modules="all-linear")
    models = [add_adapters(make_qwen2(32), lora, seed=seed) for seed in (3, 3, 4)]
    first, same, other = ({n: p for n, p in lm.named_parameters() if p.requires_grad} for lm in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    matrices = [name for name in first if ".lora_A." in name]
    assert all(not torch.equal(first[name], other[name]) for name in matrices)
    assert all(not first[name].any() for name in first.keys() - set(matrices))
    flat = torch.cat([first[name].flatten() * first[name].shape[1] ** 0.5 for name in matrices])
    assert flat.abs().max() <= 1.0
    assert flat.std().item() == pytest.approx(3**-0.5, rel=0.1)


def test_frozen_matrices_have_the_precision_of_their_products_and_the_rest_stays() -> None:
    """Those of attention and of experts. Adapters, norms, embedding and head are in float32."""
    pytest.importorskip("peft")
    lora = LoraSection(enabled=True, send="merged", r=2, alpha=2, dropout=0.0, target_modules=["q_proj", "o_proj"])
    trained, lm = make_family("qwen3_moe"), add_adapters(make_family("qwen3_moe"), lora, seed=0)
    for model in (trained, lm):
        narrow_frozen(model, torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in lm.named_parameters()}
    narrowed = {name for name, kind in kinds.items() if kind == torch.bfloat16}
    parts = ("q_proj.base_layer", "k_proj", "v_proj", "o_proj.base_layer", "experts.gate_up_proj", "experts.down_proj")
    assert {name for name in kinds if any(part in name for part in parts)} <= narrowed
    assert not any("lora_" in name or "norm" in name or "embed" in name or "lm_head" in name for name in narrowed)
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}, "nothing is frozen"


def test_adapters_on_all_linear_layers_leave_the_output_head_alone() -> None:
    pytest.importorskip("peft")
    lora = LoraSection(enabled=True, send="merged", r=2, alpha=2, dropout=0.0, target_modules="all-linear")
    lm = add_adapters(make_qwen2(32, tied=False), lora, seed=0)
    assert isinstance(lm.get_output_embeddings(), torch.nn.Linear)


@pytest.mark.parametrize(("recomputed", "twice"), [("false", 0), ("2", 2), ("9", 3), ("true", 3)])
def test_so_many_first_layers_are_computed_again_and_the_gradient_is_the_same(
    tmp_path: Path, recomputed: str, twice: int
) -> None:
    save_qwen2(tmp_path, 64, layers=3)
    ids = torch.arange(20)[None] % 64

    def calls_and_gradients(recomputed: str) -> tuple[list[int], dict[str, torch.Tensor]]:
        keys = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
        cfg = parse(compose("base", [*keys, f"finetune.gradient_checkpointing={recomputed}"]))
        lm = load_lm(tmp_path, cfg, "sdpa")
        calls = [0] * 3
        for number, layer in enumerate(decoder_layers(lm)):
            layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
        lm(input_ids=ids, labels=ids).loss.backward()
        return calls, {name: p.grad for name, p in lm.named_parameters()}

    calls, gradients = calls_and_gradients(recomputed)
    assert calls == [2] * twice + [1] * (3 - twice)
    torch.testing.assert_close(gradients, calls_and_gradients("false")[1], rtol=0, atol=0)
