"""A model with random weights, for measurements that depend on sizes alone. A trial of its own."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from pipelinerl.launcher.trial import answer
from pipelinerl.plan.model_shape import ModelShape
from pipelinerl.tiny_model.builder import sample_texts
from pipelinerl.tiny_model.recipes import make_recipe
from pipelinerl.tiny_model.tokenizer import train_tokenizer

LOGIT_DEVIATION = 4.0
"""Standard deviation of logits, as in trained models: the noise between server and trainer grows with it."""
POSITIONS = 32_768
"""As Qwen2.5-0.5B, more than the longest timed micro-batch (`Machine.trained_lengths`)."""


def qwen2_config(shape: ModelShape, **others: Any) -> Qwen2Config:
    """The configuration of a Qwen2 of this shape in bfloat16, with further fields."""
    return Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
        **others,
    )


def write_trial_model(folder: Path, shape: ModelShape, device: torch.device) -> None:
    """Write the quickstart's tokenizer, configuration and weights to a new folder. ``device`` draws the values."""
    recipe = make_recipe("largest", {})
    tokenizer = train_tokenizer(sample_texts(recipe, Random(0)), recipe.tags, recipe.max_number)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = qwen2_config(shape, max_position_embeddings=POSITIONS, bos_token_id=None, **ends)
    torch.manual_seed(0)
    with device:
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(LOGIT_DEVIATION / (config.initializer_range * shape.hidden**0.5))
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    GenerationConfig(**ends).save_pretrained(folder)
    weights = {name: p.detach().to(torch.bfloat16).cpu() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_model(job: dict[str, Any]) -> dict[str, Any]:
    write_trial_model(Path(job["folder"]), msgspec.convert(job["shape"], ModelShape), torch.device(job["accelerator"]))
    return {}


if __name__ == "__main__":
    answer(write_model)
