"""Turns a GGUF file into a model folder: weights, tokenizer and chat template, as transformers and vLLM load them.

Missing tensors and a scaling of rotary positions, which transformers ignores, are errors here.
"""

import copy
import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.tiny_model.builder import create

MAGIC = b"GGUF"
DTYPES = ("bfloat16", "float32", "float16")


def convert_gguf(file: str | Path, folder: str | Path, dtype: str = "bfloat16", *, if_missing: bool = False) -> Path:
    """Writes the model in a GGUF file as a Hugging Face folder and returns the folder.

    Args:
        file: one GGUF file of an architecture that transformers reads.
        folder: folder to create, published by one rename.
        dtype: of the written weights, one of `DTYPES`.
        if_missing: accept a model that is already in ``folder``. Otherwise an existing folder is an error.
    Raises:
        ConfigError: no such file, another format, an architecture or a feature that transformers does not read, a
            missing package, a full disk, or ``folder`` exists.
    """
    source, target = Path(file), Path(folder)
    if if_missing and (target / "config.json").is_file():
        return target
    if target.exists():
        raise ConfigError(f"{target} exists: remove it or choose another folder for the model")
    _check_file(source)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("GGUF files need the package gguf: pip install 'gguf>=0.17'")
    try:
        create(target, lambda scratch: _write(source, scratch, dtype))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    return target


def _check_file(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"the GGUF file {file} cannot be read: {error.strerror or error}") from error
    if start != MAGIC:
        raise ConfigError(f"{file} is not a GGUF file: it begins with {start!r}, not {MAGIC!r}")


def _write(file: Path, folder: Path, dtype: str) -> None:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        tensors = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        has_tokenizer = "tokenizer.ggml.tokens" in reader.fields
    except Exception as error:  # the package raises any error for a damaged file
        raise ConfigError(f"{file} is damaged or cut off: {type(error).__name__}: {error}") from error
    if fields.get("split.count", 1) > 1:
        count = fields["split.count"]
        raise ConfigError(f"{file} is one of {count} parts: join them by llama.cpp's `gguf-split --merge`")
    if not has_tokenizer:
        raise ConfigError(f"{file} has no tokenizer (`tokenizer.ggml.tokens`): use the model's own folder")
    try:
        model, tokenizer = _load(file, dtype)
    except Exception as error:  # transformers and tokenizers raise any error for a file that they do not expect
        name = fields.get("general.architecture")
        raise ConfigError(
            f"{file}: transformers does not read this file of architecture {name!r}: {type(error).__name__}: {error}"
        ) from error
    _check_positions(file, fields, tensors, model.config)
    _check_size(file, tensors, model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for written in folder.glob("*.safetensors"):
        written.chmod(0o644)  # safetensors writes files that only the owner may read
    (folder / "README.md").write_text(_card(file, fields, dtype), encoding="utf-8")


def _load(file: Path, dtype: str) -> tuple[Any, Any]:
    """Returns the model, with plain weights, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    packed, loading = AutoModelForCausalLM.from_pretrained(
        **place, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"it has no tensor for {', '.join(missing[:3])} ({len(missing)} are missing)")
    # A model that was loaded from GGUF cannot be saved, so its weights are copied into a new one.
    config = copy.deepcopy(packed.config)
    if hasattr(config, "quantization_config"):  # absent if the file holds plain weights
        del config.quantization_config
    config.dtype = getattr(torch, dtype)
    config.architectures = [type(packed).__name__]
    model = type(packed)(config).to(config.dtype)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    return model, tokenizer


def _check_size(file: Path, tensors: Mapping[str, int], model: Any) -> None:
    """Raises ``ConfigError`` for a file with tensors that transformers left out, which it does without a word."""
    not_read = ("rope_", "output.weight") if model.config.tie_word_embeddings else ("rope_",)
    there = sum(n for name, n in tensors.items() if not name.startswith(not_read) and "rope_factors" not in name)
    taken = sum({weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}.values())
    if there > taken:
        raise ConfigError(
            f"{file} holds {there} weights, of which transformers takes {taken}: use the model's own folder"
        )


def _check_positions(file: Path, fields: Mapping[str, Any], tensors: Iterable[str], config: Any) -> None:
    """Raises ``ConfigError`` for a scaling of positions that transformers did not read: long texts would be wrong."""
    name = fields.get("general.architecture")
    kind = fields.get(f"{name}.rope.scaling.type", "none")
    factors = [tensor for tensor in tensors if tensor.startswith("rope_f") or tensor.endswith("rope_factors.weight")]
    taken = getattr(config, "rope_parameters", None) or {}
    if (kind != "none" or factors) and taken.get("rope_type", "default") == "default":
        seen = f"rope scaling {kind!r}" if kind != "none" else f"the tensor {factors[0]}"
        raise ConfigError(f"{file} has {seen}, which transformers does not read from GGUF: use the model's own folder")


def _card(file: Path, fields: Mapping[str, Any], dtype: str) -> str:
    """Returns a model card with the source of the weights and their licence."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    name = fields.get("general.name", file.stem)
    licence = fields.get("general.license", "unknown")
    owner = fields.get("general.organization")
    return (
        f"---\nlicense: {licence}\n---\n# {name}\n\n"
        f"{f'By {owner}. ' if owner else ''}Weights of `{file.name}` (SHA-256 {digest}), dequantised to {dtype}.\n"
        f"Licence: {licence}, as the file states.\n"
    )
