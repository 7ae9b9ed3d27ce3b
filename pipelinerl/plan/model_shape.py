"""Sizes of a causal language model for plans of memory and throughput, read from its ``config.json`` alone.

Parameters are counted as those of a Llama-like decoder: dense or a mixture of experts, with ordinary attention or with
DeepSeek's latent attention (arXiv:2405.04434).
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import ConfigError


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of latent attention: queries, keys and values are computed from narrow vectors."""

    queries: int
    """Width of the latent of the queries. 0: they have none."""
    keys: int
    """Width of the latent of keys and values."""
    rotary: int
    """Size of the part of a head with rotary positions, whose keys all heads share."""
    plain: int
    """Size of the other part of a query or key."""
    values: int
    """Size of a head's values."""

    @property
    def cached(self) -> int:
        return self.keys + self.rotary

    def parameters(self, hidden: int, heads: int) -> int:
        whole = heads * (self.plain + self.rotary)
        queries = hidden * self.queries + self.queries * whole if self.queries else hidden * whole
        keys = hidden * self.cached + self.keys * heads * (self.plain + self.values)
        return queries + keys + heads * self.values * hidden


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
    dense_layers: int = 0
    """Layers of a mixture of experts that have an ordinary feed-forward network, of ``dense_intermediate``."""
    dense_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the shared experts, which every token visits."""
    latent: LatentAttention | None = None

    @property
    def parameters(self) -> int:
        return self._count(self.experts)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts that tokens are routed to. 0 for a dense model."""
        return self._routed_layers * 3 * self.hidden * self.intermediate * self.experts if self.experts > 1 else 0

    @property
    def active_parameters(self) -> int:
        """Parameters that one token's forward pass touches."""
        return self._count(self.active_experts)

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of the keys and values of one token in all layers."""
        width = 2 * self.kv_heads * self.head_dim if self.latent is None else self.latent.cached
        return self.layers * width * element_bytes

    def splits_over(self, ranks: int) -> bool:
        """Whether vLLM can divide the layers evenly among a server's devices. Fewer key-value heads are repeated."""
        repeats = self.latent is not None or self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0
        return repeats and self.heads % ranks == 0 and self.intermediate % ranks == 0

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden, self.heads)
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def _routed_layers(self) -> int:
        return self.layers - self.dense_layers

    def _count(self, experts: int) -> int:
        router = self.hidden * self.experts if self.experts > 1 else 0
        routed = 3 * self.hidden * (self.intermediate * experts + self.shared_intermediate) + router
        dense = 3 * self.hidden * self.dense_intermediate
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = self.layers * (self.attention_parameters + 2 * self.hidden)
        return layers + self._routed_layers * routed + self.dense_layers * dense + embeddings + self.hidden


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
    "Qwen/Qwen2.5-72B": _qwen(80, 8192, 29568, 64, 8, 152064, False),
    "Qwen/Qwen3-30B-A3B": ModelShape(
        layers=48,
        hidden=2048,
        intermediate=768,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        tied=False,
        experts=128,
        active_experts=8,
    ),
    "Qwen/Qwen3-235B-A22B": ModelShape(
        layers=94,
        hidden=4096,
        intermediate=1536,
        heads=64,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        tied=False,
        experts=128,
        active_experts=8,
    ),
}
"""Shapes for planning the default configurations without a download. A local ``config.json`` has priority."""


def find_model_shape(model_path: str) -> ModelShape | None:
    """Shape of a model folder, of a model in the local Hugging Face cache, or in `PUBLISHED_SHAPES`. Else None."""
    config = _read_config(model_path)
    return PUBLISHED_SHAPES.get(model_path.removesuffix("-Instruct")) if config is None else shape_from_config(config)


def find_longrope_limit(model_path: str) -> int | None:
    """Largest `max_model_len` with which servers take the short factors of longrope. None: no such model is found."""
    config = _read_config(model_path) or {}
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not {"short_factor", "long_factor"} <= rope.keys():
        return None
    limit = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return limit or config.get("max_position_embeddings")


def find_context_limit(model_path: str) -> int | None:
    """Positions that a model computes, unless its rope stretches them. None: it does, or no such model is found."""
    config = _read_config(model_path) or {}
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    stretched = rope.get("rope_type", rope.get("type", "default")) not in ("default", "llama3")
    return None if stretched else config.get("max_position_embeddings")


def _read_config(model_path: str) -> dict[str, Any] | None:
    """The ``config.json`` of a model folder, or of a model in the local cache."""
    path = Path(model_path) / "config.json"
    found = path if path.is_file() else _cached_config(model_path)
    try:
        return None if found is None else json.loads(found.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"`{found}` is damaged ({error}): copy, download or build the model again") from error


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
        dense = int(config["intermediate_size"])
        return ModelShape(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            latent=_latent(config),
            **({"intermediate": dense} if _experts(config) == 1 else _mixture(config, dense)),
        )
    except KeyError:
        return None


def _experts(config: dict[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((config[name] for name in names if config.get(name)), 1))


def _mixture(config: dict[str, Any], dense: int) -> dict[str, int]:
    """Fields of a mixture of experts. ``dense``: width of a layer's feed-forward network without experts."""
    width = int(config.get("moe_intermediate_size") or dense)
    shared = config.get("shared_expert_intermediate_size") or width * int(config.get("n_shared_experts") or 0)
    without = int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())
    return {
        "intermediate": width,
        "experts": _experts(config),
        "active_experts": int(config.get("num_experts_per_tok") or 1),
        "dense_layers": without,
        "dense_intermediate": dense,
        "shared_intermediate": int(shared),
    }


def _latent(config: dict[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        queries=int(config.get("q_lora_rank") or 0),
        keys=int(config["kv_lora_rank"]),
        rotary=int(config["qk_rope_head_dim"]),
        plain=int(config["qk_nope_head_dim"]),
        values=int(config["v_head_dim"]),
    )
