"""Makes a model folder: tokenizer, weights, warm-up, published by one rename.

torch and transformers are imported only when something is built: the launcher imports this package to check names.
"""

import os
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.tiny_model.recipes import Recipe, make_recipe

TOKENIZER_SAMPLE = 200
"""Conversations the tokenizer learns its merges from."""


def build(path: str | Path, recipe: str, seed: int, params: dict[str, Any] | None = None) -> Path:
    """Builds the model of ``recipe`` in folder ``path`` and returns it.

    Args:
        path: folder to create. An existing one is an error; two builders at once publish one of their equal results.
        recipe: a name in ``RECIPES``.
        seed: determines tokenizer sample, initial weights and warm-up data.
        params: the recipe's own parameters, e.g. ``{"max_number": 30}``.

    Raises:
        ConfigError: unknown recipe or parameter, or ``path`` exists.
    """
    target = Path(path)
    made = make_recipe(recipe, dict(params or {}))
    if target.exists():
        raise ConfigError(f"{target} exists: remove it or choose another folder for the tiny model")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_model(scratch, made, seed)
        scratch.chmod(0o755)
        publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def publish(scratch: Path, target: Path) -> None:
    """Renames the finished folder into place; a builder that lost the race keeps the winner's equal folder."""
    try:
        os.rename(scratch, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


def write_model(folder: Path, recipe: Recipe, seed: int) -> None:
    """Writes tokenizer, configuration and warmed-up weights in Hugging Face format."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from pipelinerl.tiny_model.tokenizer import train_tokenizer
    from pipelinerl.tiny_model.warmup import warm_up

    rng = Random(seed)
    sample = [f"{m['role']}\n{m['content']}" for _ in range(TOKENIZER_SAMPLE) for m in recipe.conversation(rng)]
    tokenizer = train_tokenizer(sample, recipe.tags, recipe.max_number)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(
                Qwen2Config(
                    vocab_size=len(tokenizer),
                    hidden_size=64,
                    intermediate_size=128,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    max_position_embeddings=2048,
                    tie_word_embeddings=True,
                    initializer_range=0.1,
                    bos_token_id=None,
                    eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                    dtype="float32",
                    architectures=["Qwen2ForCausalLM"],
                )
            )
            warm_up(model, tokenizer, recipe.conversation, recipe.steps, rng)
    finally:
        torch.set_num_threads(threads)
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    ends = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    ends.save_pretrained(folder)
    # Not by save_pretrained, which imports accelerate and DeepSpeed. The tied head is one parameter, stored once.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
