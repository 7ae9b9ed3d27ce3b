"""Random small models of the tests: the same seed and shape give the same weights everywhere."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipelinerl.tiny_model import build

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
"""Families whose weights vLLM splits over the workers of a server, each in another way."""


def _attention(heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | others


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {"model_type": "qwen2", "num_hidden_layers": 28, "vocab_size": 152064, "hidden_size": 3584}
    | {"intermediate_size": 18944}
    | _attention(28, 4),
    "Qwen2.5-72B": {"model_type": "qwen2", "num_hidden_layers": 80, "vocab_size": 152064, "hidden_size": 8192}
    | {"intermediate_size": 29568}
    | _attention(64, 8),
    "Mixtral-8x7B": {"model_type": "mixtral", "num_hidden_layers": 32, "vocab_size": 32000, "hidden_size": 4096}
    | {"intermediate_size": 14336, "num_local_experts": 8}
    | _attention(32, 8),
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "num_hidden_layers": 48, "vocab_size": 151936, "hidden_size": 2048}
    | {"intermediate_size": 6144, "num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    | _attention(32, 4, head_dim=128),
    "Qwen3-235B-A22B": {"model_type": "qwen3_moe", "num_hidden_layers": 94, "vocab_size": 151936, "hidden_size": 4096}
    | {"intermediate_size": 12288, "num_experts": 128, "moe_intermediate_size": 1536, "num_experts_per_tok": 8}
    | _attention(64, 4, head_dim=128),
    "GLM-4.5-Air": {"model_type": "glm4_moe", "num_hidden_layers": 46, "vocab_size": 151552, "hidden_size": 4096}
    | {"intermediate_size": 10944, "n_routed_experts": 128, "moe_intermediate_size": 1408, "num_experts_per_tok": 8}
    | {"first_k_dense_replace": 1, "n_shared_experts": 1}
    | _attention(96, 8, head_dim=128, attention_bias=True),
    "Qwen3-Next-80B-A3B": {"model_type": "qwen3_next", "num_hidden_layers": 48, "vocab_size": 151936}
    | {"hidden_size": 2048, "intermediate_size": 5120, "shared_expert_intermediate_size": 512}
    | {"num_experts": 512, "moe_intermediate_size": 512, "num_experts_per_tok": 10}
    | _attention(16, 2, head_dim=256),
}
"""Published models: what of their configurations decides the shapes of their tensors."""


def save_published(folder: Path, name: str, *, layers: int | None = None) -> Path:
    """Writes the configuration of a published model, with all of its layers or so many, and no weights."""
    sizes = PUBLISHED[name] | {"tie_word_embeddings": False, "max_position_embeddings": 4096, "dtype": "bfloat16"}
    config = AutoConfig.for_model(**(sizes | ({} if layers is None else {"num_hidden_layers": layers})))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return folder


def make_family(name: str) -> PreTrainedModel:
    """A float32 model of one of the `FAMILIES`, of a size that vLLM can split into four."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    others = {"initializer_range": 0.2, "max_position_embeddings": 4096, "eos_token_id": 0, "bos_token_id": None}
    config = AutoConfig.for_model(name, **(sizes | heads | others | {"pad_token_id": None} | FAMILIES[name]))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_qwen2(
    vocab_size: int, *, hidden: int = 16, intermediate: int = 32, layers: int = 2, tied: bool = True, **config: Any
) -> Qwen2ForCausalLM:
    """A float32 Qwen2 with two query heads and one key-value head unless ``config`` says otherwise."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            tie_word_embeddings=tied,
            **(heads | config),
        )
    )


def make_mixture(vocab_size: int) -> PreTrainedModel:
    """A float32 Qwen3-MoE of two layers with 8 experts, of which every token visits 2."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "moe_intermediate_size": 8, "initializer_range": 0.2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=vocab_size, **sizes, **heads, **experts)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_mixture(folder: Path) -> PreTrainedModel:
    """Writes a random Qwen3-MoE with the quickstart's tokenizer and returns it. Four ranks can divide it."""
    words = AutoConfig.from_pretrained(build(folder, "largest", 0, {"max_number": 30, "steps": 1}))
    names = ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    special = {name: getattr(words, name) for name in names}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts, **special)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lm.save_pretrained(folder)
    return lm


def save_qwen2(folder: Path, vocab_size: int, **shape: Any) -> Path:
    """Writes the model and a tokenizer whose words are ``t0`` … ``t{vocab_size - 1}``; returns ``folder``."""
    return save_with_words(make_qwen2(vocab_size, **shape), folder)


def save_with_words(lm: PreTrainedModel, folder: Path) -> Path:
    """Writes a model and a tokenizer whose words are ``t0``, ``t1`` …; returns ``folder``."""
    from tokenizers import Tokenizer, models

    lm.save_pretrained(folder)
    words = {f"t{i}": i for i in range(lm.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1").save_pretrained(folder)
    return folder
