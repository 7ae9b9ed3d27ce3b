"""Every architecture gives its own log-probs in the trainer, or is refused before anything starts with a cure.

The configurations are transformers' defaults, at full size: what is compared is a small copy of each.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pipelinerl.errors import ConfigError
from pipelinerl.finetune import architecture
from pipelinerl.finetune.architecture import Architecture, Comparison, examine_config
from pipelinerl.finetune.attention import PACKED, announce, packed_attention, register_attention
from pipelinerl.finetune.model import Tokens
from pipelinerl.finetune.rl.head import LogitMap
from pipelinerl.finetune.small_copy import small_copy
from tests.says import says

PLAIN = LogitMap()
PACKABLE = {
    "llama": ({}, PLAIN),
    "mistral": ({"sliding_window": 4096}, PLAIN),
    "mixtral": ({}, PLAIN),
    "gemma2": ({}, LogitMap(softcap=30.0)),
    "gemma3_text": ({}, PLAIN),
    "gemma3": ({}, PLAIN),
    "gemma4_text": ({"final_logit_softcapping": 30.0}, LogitMap(softcap=30.0)),
    "gemma4": ({"text_config": {"final_logit_softcapping": 20.0}}, LogitMap(softcap=20.0)),
    "qwen2": ({}, PLAIN),
    "qwen3": ({}, PLAIN),
    "qwen3_moe": ({}, PLAIN),
    "phi": ({}, PLAIN),
    "phi3": ({}, PLAIN),
    "olmo2": ({}, PLAIN),
    "olmo3": ({}, PLAIN),
    "cohere2": ({}, LogitMap(scale=0.0625)),
    "granite": ({"logits_scaling": 8.0, "residual_multiplier": 0.3}, LogitMap(scale=0.125)),
    "hyperclovax": ({"logits_scaling": 0.5}, LogitMap(scale=0.5)),
    "gpt_oss": ({}, PLAIN),
    "glm4": ({}, PLAIN),
    "glm4_moe": ({}, PLAIN),
    "deepseek_v3": ({}, PLAIN),
}
ROWS_ONLY = {
    "qwen3_next": ({}, PLAIN),
    "falcon_h1": ({"lm_head_multiplier": 0.25}, LogitMap(scale=0.25)),
    "mamba2": ({"hidden_size": 256, "num_heads": 8}, PLAIN),
    "minimax": ({}, PLAIN),
    "jamba": ({}, PLAIN),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 16}, PLAIN),
    "nemotron_h": ({}, PLAIN),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Many tiny operations: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_config(model_type: str, **values: Any) -> Any:
    return AutoConfig.for_model(model_type, **values)


def fast_and_slow(model_types: Iterable[str], slow: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in model_types]


@pytest.mark.parametrize("model_type", fast_and_slow(PACKABLE, ["gemma4"]))
def test_packed_documents_have_the_model_s_own_logprobs(model_type: str):
    values, logit_map = PACKABLE[model_type]
    found = examine_config(make_config(model_type, **values), share_prefixes=True)
    assert found == Architecture(attention=PACKED, logit_map=logit_map)


@pytest.mark.parametrize("model_type", fast_and_slow(ROWS_ONLY, ["falcon_h1", "nemotron_h", "jamba"]))
def test_architectures_with_states_train_in_rows_and_say_so(model_type: str):
    values, logit_map = ROWS_ONLY[model_type]
    config = make_config(model_type, **values)
    with pytest.raises(ConfigError, match=says("packed documents", "finetune.seq_packing=false")):
        examine_config(config)
    assert examine_config(config, packing=False).logit_map == logit_map


SPARSE = {
    "glm_moe_dsa": ({}, "index_topk=2048 "),
    "deepseek_v32": ({"index_topk": 300}, "index_topk=300 "),
}


@pytest.mark.parametrize("model_type", fast_and_slow(SPARSE, ["glm_moe_dsa"]))
def test_sparse_attention_is_refused_beyond_the_keys_that_it_chooses(model_type: str):
    """Keys of equal scores are chosen in another order in a pack. Up to its number, all keys are chosen."""
    values, said = SPARSE[model_type]
    narrow = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 5}
    config = make_config(model_type, **narrow, q_lora_rank=64, kv_lora_rank=32, **values)
    with pytest.raises(ConfigError, match=f"more than {said}tokens .*max_model_len to at most "):
        examine_config(config, longest=4096)
    assert examine_config(config, longest=config.index_topk).attention == "sdpa"
    with pytest.raises(ConfigError, match=says("finetune.share_prefixes", "its attention is sdpa", "set it to off")):
        examine_config(config, longest=config.index_topk, share_prefixes=True)


def test_prefix_whose_keys_are_not_seen_is_refused(monkeypatch: pytest.MonkeyPatch):
    def forgetful(documents: Any, device: Any, *_: Any) -> None:
        announce(documents, device)

    monkeypatch.setattr("pipelinerl.finetune.model.announce", forgetful)
    with pytest.raises(ConfigError, match=says("finetune.share_prefixes", "nats", "set it to off")):
        examine_config(make_config("qwen2"), share_prefixes=True)


def test_blocks_of_keys_are_refused_in_packs():
    """Alone they are exact: the blocks of a pack begin elsewhere. It takes more tokens than blocks times their size."""
    config = make_config("minimax_m3_vl_text", layer_types=["full_attention"] * 3 + ["minimax_m3_sparse"] * 57)
    with pytest.raises(ConfigError, match=says("packed documents", "finetune.seq_packing=false")):
        examine_config(config, longest=8192)


def test_copy_lowers_what_its_documents_cross_and_leaves_the_order():
    """gpt_oss has windows of 128, rope from 4,096 and at most 131,072 positions."""
    found = small_copy(make_config("gpt_oss"), longest=4097)
    lowered = {(t.name, t.value): (t.lowered, t.is_crossed) for t in found.thresholds}
    assert lowered["sliding_window", 128] == (4, True)
    assert lowered["original_max_position_embeddings", 4096] == (6, True)
    assert max(found.lengths) == 4 * 6 + 1
    assert lowered["max_position_embeddings", 131072] == (25, False)
    assert found.lm.config.sliding_window == 4
    assert found.lm.config.rope_parameters["original_max_position_embeddings"] == 6
    shorter = small_copy(make_config("gpt_oss"), longest=4096)
    assert [t.name for t in shorter.thresholds if t.is_crossed] == ["sliding_window"]


def test_layers_between_the_model_and_its_head_are_refused():
    """ModernBERT's decoder has a dense layer there; the trainer's log-probs are off by nats."""
    with pytest.raises(ConfigError, match=says("ModernBertDecoderForCausalLM", "own logits", "head")):
        examine_config(make_config("modernbert-decoder"))


def test_attention_that_leaves_a_softcap_out_is_refused_with_the_one_that_does_not():
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM .*sdpa: off by.*set finetune.attn_implementation=auto"):
        examine_config(make_config("gemma2"), attention="sdpa")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_cannot_isolate_sinks_is_refused_with_the_one_that_can(attention: str):
    with pytest.raises(ConfigError, match=r"GptOssForCausalLM .*set finetune.attn_implementation=auto"):
        examine_config(make_config("gpt_oss"), attention=attention)


def test_ranks_that_share_a_pack_take_packed_attention_or_none(monkeypatch: pytest.MonkeyPatch):
    for name in ("qwen3", "gemma2", "gpt_oss"):
        assert examine_config(make_config(name), attention="eager", seq_parallel=2).attention == PACKED
    monkeypatch.setattr(Comparison, "packed_error", lambda *_: 1.0)
    with pytest.raises(ConfigError, match=r"set finetune\.seq_parallel=1"):
        examine_config(make_config("qwen3"), seq_parallel=2)


def test_logits_changed_in_another_way_are_refused(monkeypatch: pytest.MonkeyPatch):
    copied = small_copy(make_config("qwen2"))
    plain = type(copied.lm).forward

    def squared(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.square()
        return output

    monkeypatch.setattr(type(copied.lm), "forward", squared)
    with pytest.raises(ConfigError, match=r"neither a scale nor a softcap"):
        Comparison(copied)


def test_a_leak_smaller_than_the_former_bound_is_seen(monkeypatch: pytest.MonkeyPatch):
    """A thousandth of the first document's keys in every other one: 0.05 let it pass."""
    register_attention(PACKED, packed_attention)
    comparison = Comparison(small_copy(make_config("qwen2")))
    exact = architecture.Policy.hidden_states

    def leaking(self: Any, batch: Tokens) -> torch.Tensor:
        states = exact(self, batch)
        return states + 1e-3 * states[:, :1]

    assert comparison.packed_error(PACKED) <= 1e-5
    monkeypatch.setattr(architecture.Policy, "hidden_states", leaking)
    assert 1e-4 < comparison.packed_error(PACKED) < 0.05


@pytest.mark.parametrize(("model_type", "layers"), [("qwen3_moe", 2), ("gemma3_text", 6), ("qwen3_next", 4)])
def test_copy_has_one_layer_of_each_kind_and_costs_little(model_type: str, layers: int):
    """Dense or one expert layer twice; five windows and a whole attention; three linear attentions and a whole one."""
    lm = small_copy(make_config(model_type)).lm
    assert lm.config.get_text_config().num_hidden_layers == layers
    assert sum(p.numel() for p in lm.parameters()) <= 5e6
