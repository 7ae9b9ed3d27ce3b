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

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
"""Families whose weights vLLM splits over the workers of a server, each in another way."""


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


def save_qwen2(folder: Path, vocab_size: int, **shape: Any) -> Path:
    """Writes the model and a tokenizer whose words are ``t0`` … ``t{vocab_size - 1}``; returns ``folder``."""
    from tokenizers import Tokenizer, models

    make_qwen2(vocab_size, **shape).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1").save_pretrained(folder)
    return folder
