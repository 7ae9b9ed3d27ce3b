"""Sizes of a causal language model, read from its ``config.json`` alone.

They are used only for plans of memory and throughput. Parameters are counted as those of a Llama-like decoder, dense or
mixture of experts.
"""

import json
from pathlib import Path
from typing import Any

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes on which memory and throughput depend."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 1
    active_experts: int = 1

    @property
    def parameters(self) -> int:
        return self._count(self.experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token's forward pass touches."""
        return self._count(self.active_experts)

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def _count(self, experts: int) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        feed_forward = 3 * self.hidden * self.intermediate * experts + router
        layer = attention + feed_forward + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden


def _qwen(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=vocab,
        tied=tied,
    )


PUBLISHED_SHAPES = {
    "Qwen/Qwen2.5-0.5B": _qwen(24, 896, 4864, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B": _qwen(28, 1536, 8960, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B": _qwen(36, 2048, 11008, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B": _qwen(28, 3584, 18944, 28, 4, 152064, False),
    "Qwen/Qwen2.5-14B": _qwen(48, 5120, 13824, 40, 8, 152064, False),
    "Qwen/Qwen2.5-32B": _qwen(64, 5120, 27648, 40, 8, 152064, False),
}
"""Shapes for planning the default configurations without a download. A local ``config.json`` has priority."""


def find_model_shape(model_path: str) -> ModelShape | None:
    """Shape of a model folder, of a model in the local Hugging Face cache, or in `PUBLISHED_SHAPES`. Else None."""
    folder = Path(model_path)
    if (folder / "config.json").is_file():
        return shape_from_config(json.loads((folder / "config.json").read_text()))
    cached = _cached_config(model_path)
    if cached is not None:
        return shape_from_config(json.loads(cached.read_text()))
    return PUBLISHED_SHAPES.get(model_path.removesuffix("-Instruct"))


def _cached_config(model_path: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model_path, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def shape_from_config(config: dict[str, Any]) -> ModelShape | None:
    """Shape of a ``config.json``. None if it is not a decoder whose sizes have the usual names."""
    config = {**config, **config.get("text_config", {})}
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 1)
        dense = int(config["intermediate_size"])
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config.get("moe_intermediate_size") or dense) if experts > 1 else dense,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            active_experts=int(config.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        )
    except KeyError:
        return None
