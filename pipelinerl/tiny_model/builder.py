"""Makes a model folder: tokenizer, weights, warm-up. It is published by one rename, and cached under a digest.

torch and transformers are imported only when something is built: the launcher imports this package to check names.
"""

import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.tiny_model.recipes import Recipe, make_recipe
from pipelinerl.world.disk import sync_path

log = logging.getLogger(__name__)

TOKENIZER_SAMPLE = 200
"""Conversations from which the tokenizer learns its merges."""
HEAD_SIZE = 32
"""Width of an attention head: the smallest that vLLM's attention supports on every device."""
SOURCES = ("tiny_model", "chat", "preprocess", "finetune")
"""Folders of the package whose code makes and trains a model. A change there makes cached models invalid."""
SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"


def build(
    path: str | Path,
    recipe: str,
    seed: int,
    params: dict[str, Any] | None = None,
    cache: Path | None = None,
    *,
    if_missing: bool = False,
) -> Path:
    """Builds the model of ``recipe`` in folder ``path`` and returns it.

    Args:
        path: folder to create. If two processes build it at the same time, one publishes the result.
        recipe: a name in ``RECIPES``, or the dotted name of a function.
        seed: determines tokenizer sample, initial weights and warm-up data.
        params: the recipe's parameters, e.g. ``{"max_number": 30}``.
        cache: folder of models built before. If it cannot be used, the model is built. None: no cache.
        if_missing: accept a model that is already in ``path``. Otherwise an existing folder is an error.

    Raises:
        ConfigError: unknown recipe or parameter, or ``path`` exists.
    """
    target = Path(path)
    made = make_recipe(recipe, dict(params or {}))
    if if_missing:
        discard_broken(target)
    if if_missing and (target / "config.json").is_file():
        return target
    if target.exists():
        raise ConfigError(f"{target} exists: remove it or choose another folder for the tiny model")
    kept = cache / recipe_digest(made, seed) if cache else None
    if kept and not discard_broken(kept) and (kept / "config.json").is_file():
        create(target, lambda folder: copy_files(kept, folder))
        return target
    create(target, lambda folder: write_model(folder, made, seed))
    if kept:
        try:
            create(kept, lambda folder: copy_files(target, folder))
        except OSError as error:
            log.warning("event=model_not_cached folder=%s error=%s", kept, error)
    return target


def recipe_digest(recipe: Recipe, seed: int) -> str:
    """Returns a digest of a recipe's conversations and settings, the seed, and the code and packages that train."""
    settings = {name: value for name, value in vars(recipe).items() if name != "conversation"}
    versions = [version(package) for package in ("torch", "transformers", "tokenizers")]
    package = Path(__file__).parent.parent
    sources = [
        file.read_text(encoding="utf-8") for folder in SOURCES for file in sorted((package / folder).rglob("*.py"))
    ]
    content = [settings | {"shape": asdict(recipe.shape)}, sample_texts(recipe, Random(seed)), seed, versions, sources]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def sample_texts(recipe: Recipe, rng: Random) -> list[str]:
    return [f"{m['role']}\n{m['content']}" for _ in range(TOKENIZER_SAMPLE) for m in recipe.conversation(rng)]


def copy_files(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)


def create(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a temporary folder and renames it to ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(scratch)
        scratch.chmod(0o755)
        for written in (*scratch.iterdir(), scratch):
            sync_path(written)  # or a power cut could keep the name without the content
        publish_model(scratch, target)
        sync_path(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish_model(scratch: Path, target: Path) -> None:
    """Renames the finished folder into place. If another process was first, its equal folder stays."""
    try:
        os.rename(scratch, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise


def discard_broken(folder: Path) -> str | None:
    """Removes a built model that a power cut left incomplete. Returns the incomplete part.

    None: it is complete, or the folder has files that no build writes, and stays.
    """
    if not folder.is_dir():
        return None
    names = {path.name for path in folder.iterdir()}
    if not names <= {*SETTINGS, WEIGHTS, TEMPLATE}:
        return None
    broken = next((name for name in sorted(names) if is_broken(folder / name)), None if names else "it is empty")
    if broken is not None:
        shutil.rmtree(folder)
    return broken


def is_broken(path: Path) -> bool:
    """Whether a model's file is shorter than its header says, or does not have the format of its name."""
    with open(path, "rb") as file:
        try:
            if path.name == TEMPLATE:
                return not file.read(1)
            if path.name in SETTINGS:
                return not isinstance(json.load(file), dict)
            (length,) = struct.unpack("<Q", file.read(8))
            tensors = json.loads(file.read(min(length, path.stat().st_size)))
            ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
            return 8 + length + max(ends) != path.stat().st_size
        except (ValueError, LookupError, TypeError, AttributeError, struct.error):
            return True


def write_model(folder: Path, recipe: Recipe, seed: int) -> None:
    """Writes tokenizer, configuration and warmed-up weights in Hugging Face format."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    from pipelinerl.tiny_model.tokenizer import train_tokenizer
    from pipelinerl.tiny_model.warmup import warm_up_model

    rng = Random(seed)
    tokenizer = train_tokenizer(sample_texts(recipe, rng), recipe.tags, recipe.max_number)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(
                Qwen2Config(
                    vocab_size=len(tokenizer),
                    hidden_size=HEAD_SIZE * recipe.shape.heads,
                    intermediate_size=2 * HEAD_SIZE * recipe.shape.heads,
                    num_hidden_layers=recipe.shape.layers,
                    num_attention_heads=recipe.shape.heads,
                    num_key_value_heads=recipe.shape.heads,
                    max_position_embeddings=recipe.shape.positions,
                    use_sliding_window=recipe.shape.window is not None,
                    sliding_window=recipe.shape.window,
                    max_window_layers=0,
                    tie_word_embeddings=True,
                    initializer_range=0.1,
                    bos_token_id=None,
                    eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                    dtype="float32",
                    architectures=["Qwen2ForCausalLM"],
                )
            )
            warm_up_model(model, tokenizer, recipe, rng)
    finally:
        torch.set_num_threads(threads)
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    ends = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    ends.save_pretrained(folder)
    # Not by save_pretrained, which imports accelerate and DeepSpeed. The tied head is one parameter, stored once.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
