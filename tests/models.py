"""Random small models of the tests: the same seed and shape give the same weights everywhere."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


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
