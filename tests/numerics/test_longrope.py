"""Rope that depends on lengths: the trainer takes vLLM's factors whatever lies in a pack, or refuses the length."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.architecture import examine_config
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.longrope import fix_longrope, restore_longrope
from pipelinerl.finetune.model import Policy, Tokens
from pipelinerl.finetune.small_copy import small_copy
from pipelinerl.world.process import process_restored
from tests.says import says

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported
ORIGINAL, LONGEST, HEAD = 24, 96, 16
SHORT = [1.0, 1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0]
LONG = [1.0, 2.0, 4.0, 7.0, 12.0, 20.0, 35.0, 60.0]
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT, "long_factor": LONG}
SIZES = {
    **{"vocab_size": 64, "hidden_size": 4 * HEAD, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LONGEST},
}


def make_config(**rope: Any) -> Any:
    given = copy.deepcopy(ROPE | rope)
    return AutoConfig.for_model("phi3", **SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=given)


def make_lm(config: Any, attention: str = "eager") -> Any:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float64, attn_implementation=attention
    ).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    return lm


@torch.no_grad()
def alone(lm: Any, ids: torch.Tensor) -> torch.Tensor:
    """float64 [L - 1] log-probs of a document, by the model's own logits."""
    return lm(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("max_model_len", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, LONGEST])
@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="as Phi-3"),
        pytest.param({"attention_factor": 3.0}, id="a scale that vLLM does not read"),
        pytest.param({"factor": 9.0}, id="a ratio that vLLM does not read"),
        pytest.param({"short_mscale": 1.2, "long_mscale": 1.7}, id="two scales as Phi-3.5-MoE"),
        pytest.param({"partial_rotary_factor": 1.0}, id="a whole head"),
    ],
)
def test_trainer_rotates_as_vllm_s_own_module(
    max_model_len: int, extra: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as served

    server = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
    monkeypatch.setattr(served, "get_current_vllm_config", lambda: server)
    scales = {name: value for name, value in extra.items() if name.endswith("mscale")}
    theirs = served.Phi3LongRoPEScaledRotaryEmbedding(
        HEAD, HEAD, LONGEST, ORIGINAL, 10000.0, True, torch.float32, SHORT, LONG, **scales
    )
    config = make_config(**extra)
    fix_longrope(config, max_model_len)
    ours = Phi3RotaryEmbedding(config)
    for lengths in ((5, 9), (ORIGINAL, 3), (ORIGINAL + 1, 4), (7, LONGEST)):  # of the documents of a pack
        lengths = tuple(min(length, max_model_len) for length in lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        query, key = torch.randn(2, len(positions), HEAD).unbind()
        wanted = theirs(positions, query, key)
        cos, sin = ours(query, positions[None])
        found = apply_rotary_pos_emb(query[None, None], key[None, None], cos, sin)
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(other[0, 0], one, rtol=0, atol=2e-5)


@pytest.mark.parametrize("max_model_len", [ORIGINAL, ORIGINAL + 1, LONGEST])
def test_document_beside_a_longer_one_has_the_logprobs_that_it_has_alone(max_model_len: int) -> None:
    register_attention(PACKED, packed_attention)
    config = make_config()
    fix_longrope(config, max_model_len)
    reference, packed = make_lm(config), make_lm(config, PACKED)
    documents = [torch.randint(1, 64, (min(length, max_model_len),)) for length in (9, LONGEST, 24, 25, 40, 3)]
    ids = torch.cat(documents)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    targets = torch.cat([document.roll(-1) for document in documents])
    with torch.no_grad():
        found = Policy(packed, chunk=64)(Tokens(ids[None], positions[None], targets))
    for document, logprobs in zip(documents, found.split([len(x) for x in documents]), strict=True):
        wanted = alone(reference, document)
        torch.testing.assert_close(logprobs[:-1], wanted, rtol=0, atol=2e-5)  # the rope and the head are in float32


def test_factors_matter() -> None:
    """What the tests above would miss if the factors had no effect."""
    document = torch.randint(1, 64, (ORIGINAL,))
    found = []
    for max_model_len in (ORIGINAL, LONGEST):
        config = make_config()
        fix_longrope(config, max_model_len)
        found.append(alone(make_lm(config), document))
    assert (found[0] - found[1]).abs().max() > 0.01


def test_scale_is_the_square_root_of_the_paper() -> None:
    config = make_config()
    fix_longrope(config, LONGEST)
    expected = math.sqrt(1 + math.log(LONGEST / ORIGINAL) / math.log(ORIGINAL))
    assert config.rope_parameters["attention_factor"] == pytest.approx(expected, rel=1e-12)
    assert config.rope_parameters["short_factor"] == LONG


def test_exported_configuration_is_that_of_the_file(tmp_path: Any) -> None:
    config = make_config(attention_factor=3.0)
    before = config.to_dict()
    fix_longrope(config, LONGEST)
    fix_longrope(config, LONGEST)
    restore_longrope(config)
    assert config.to_dict() == before
    plain = AutoConfig.for_model("llama")
    fix_longrope(plain, None)
    assert plain.to_dict() == AutoConfig.for_model("llama").to_dict()


def test_length_that_decides_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len` is null: .*longrope.*; set it"):
        fix_longrope(make_config(), None)


def test_reference_servers_that_would_take_the_long_factors_are_refused() -> None:
    with pytest.raises(ConfigError, match=rf"is {ORIGINAL}, which .*set it to {ORIGINAL - 1}"):
        fix_longrope(make_config(), ORIGINAL, has_reference=True)
    for fitting in (ORIGINAL - 1, ORIGINAL + 1):
        fix_longrope(make_config(), fitting, has_reference=True)


@pytest.mark.parametrize("max_model_len", [16, ORIGINAL, ORIGINAL + 1, LONGEST])
def test_start_accepts_longrope_at_every_length(max_model_len: int) -> None:
    config = make_config()
    assert examine_config(config, longest=max_model_len).attention == PACKED
    fix_longrope(config, max_model_len)
    copied = small_copy(config, longest=max_model_len)
    crossed = {threshold.name for threshold in copied.thresholds if threshold.is_crossed}
    assert ("original_max_position_embeddings" in crossed) == (max_model_len > ORIGINAL)


def test_longrope_that_follows_the_pack_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.finetune.architecture.fix_longrope", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=rf"original_max_position_embeddings={ORIGINAL} tokens .*at most {ORIGINAL}"):
        examine_config(make_config(), longest=LONGEST)
    assert examine_config(make_config(), longest=ORIGINAL).attention == PACKED


def test_dynamic_rope_is_refused_where_it_depends_on_the_pack() -> None:
    """Up to the limit it is ordinary rope in transformers and vLLM, whose table of cosines ends there."""
    config = AutoConfig.for_model(
        "llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    )
    for packing in (True, False):
        with pytest.raises(ConfigError, match=says("max_position_embeddings=2048", "max_model_len", "at most 2048")):
            examine_config(config, longest=2049, packing=packing)
        examine_config(config, longest=2048, packing=packing)


def test_dynamic_rope_of_vllm_is_ordinary_up_to_its_limit() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    settings = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = AutoConfig.for_model("llama", **SIZES, rope_parameters=settings)
    with process_restored(), set_current_vllm_config(VllmConfig()):  # which sets LD_PRELOAD and more
        table = get_rope(HEAD, LONGEST, True, config.rope_parameters, torch.float32).cos_sin_cache
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=LONGEST)
    angles = torch.arange(LONGEST)[:, None] * frequencies
    torch.testing.assert_close(table, torch.cat([angles.cos(), angles.sin()], -1), rtol=0, atol=1e-5)
