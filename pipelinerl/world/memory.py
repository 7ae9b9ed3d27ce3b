"""Estimates the memory of the trainer's and the servers' devices from the configuration and the model's shape.

The plan is made before the start. Its states and caches are exact sums, its activations a rule of thumb.
Bytes per parameter P of one trainer rank (N ranks, float32 master weights everywhere):

    ddp       16 P               weights, gradient, two Adam moments in float32
    fsdp2     12 P / N + 4 P     sharded, but the gradient is whole until the step's one synchronisation
    deepspeed bf16  2 P + 2 P + 12 P  stage 1 shards the 12 P, stage 2 also the gradient (then 4 P), stage 3 all
              fp32  4 P + 4 P + 8 P   sharded in the same way

With LoRA the weights count as a whole, and gradient and optimizer states count only for the adapters.
"""

from typing import Any

import msgspec

from pipelinerl.config.engine import engine_of, zero_stage
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import server_options
from pipelinerl.world.map import WorldMap
from pipelinerl.world.model_shape import ModelShape

GIB = 2**30
ASSUMED_GPU_BYTES = 80 * GIB
DEFAULT_UTILIZATION = 0.9
RUNTIME_BYTES = 2 * GIB
"""CUDA context, communication buffers, fragmentation."""
SMALLER_TRAINER = (
    ("finetune.gradient_checkpointing", True),
    ("finetune.engine", "fsdp2"),
    ("finetune.lora.enabled", True),
)
"""Settings that make a trainer smaller, the least intrusive first."""
MAX_RANKS_POWER = 11
LAYER_ACTIVATION_FACTOR = 34
"""Bytes per token and hidden unit of one layer's activations in 16 bit (arXiv 2205.05198, eq. 1, attention fused)."""


class MemoryItem(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    num_bytes: int


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one GPU (or CPU slot) of the jobs of a kind."""

    kind: str
    num_devices: int
    items: tuple[MemoryItem, ...]
    capacity: int
    """Bytes of the device that this kind may use."""
    note: str = ""

    @property
    def total(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def memory_plan(
    cfg: Config, world: WorldMap, shape: ModelShape, gpu_bytes: int = ASSUMED_GPU_BYTES
) -> tuple[DevicePlan, ...]:
    """Return the plans of the trainer's and the servers' devices. `gpu_bytes` is the memory of one GPU."""
    ranks = world.trainer_world_size
    trainer = trainer_items(cfg, shape, ranks)
    total = sum(item.num_bytes for item in trainer)
    share = utilization(cfg) if world.share_devices else 0.0
    plans = [
        DevicePlan(
            kind="finetune",
            num_devices=ranks,
            items=trainer,
            capacity=int(gpu_bytes * (1 - share)),
            note=_trainer_note(cfg, ranks, gpu_bytes, total, share),
        )
    ]
    for kind in ("actor_llm", "preprocessor_llm"):
        servers = world.get(kind)
        if servers:
            plans.append(server_plan(cfg, shape, kind, servers[0].num_ranks, len(servers), gpu_bytes))
    return tuple(plans)


def _trainer_note(cfg: Config, ranks: int, gpu_bytes: int, total: int, share: float) -> str:
    engine = engine_of(cfg, ranks)
    stage = f" stage {zero_stage(cfg)}" if engine == "deepspeed" else ""
    note = f"{engine}{stage}, {ranks} rank(s)"
    if share:
        largest = max((gpu_bytes - total) / gpu_bytes, 0.0)
        note += f"; leaves the server gpu-memory-utilization ≤ {largest:.2f}"
    return note


def state_bytes(
    parameters: int, *, engine: str, stage: int, ranks: int, half: bool, trained: int | None = None
) -> tuple[int, int, int]:
    """Bytes of weights, gradient, and optimizer states with master weights on one rank.

    Args:
        stage: DeepSpeed's ZeRO stage.
        half: whether the trainer's weights are bfloat16.
        trained: number of trained parameters. None = all.
    """
    if engine == "deepspeed":
        weights, gradient, states = (2, 4 if stage > 1 else 2, 12) if half else (4, 4, 8)
        sharded = (stage >= 3, stage >= 2, stage >= 1)
    else:
        weights, gradient, states = 4, 4, 8
        sharded = (engine == "fsdp2", False, engine == "fsdp2")
    learning = parameters if trained is None else trained
    parts = [ranks if shard else 1 for shard in sharded]
    return weights * parameters // parts[0], gradient * learning // parts[1], states * learning // parts[2]


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Number of adapter parameters on all linear layers of the decoder: rank × (inputs + outputs) for each layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    return shape.layers * rank * (attention + 3 * shape.experts * (shape.hidden + shape.intermediate))


def trainer_items(cfg: Config, shape: ModelShape, ranks: int) -> tuple[MemoryItem, ...]:
    """Return what one of `ranks` trainer ranks holds at its peak."""
    finetune = cfg.finetune
    half = finetune.dtype == "bfloat16"
    weights, gradient, states = state_bytes(
        shape.parameters,
        engine=engine_of(cfg, ranks),
        stage=zero_stage(cfg),
        ranks=ranks,
        half=half,
        trained=lora_parameters(shape, finetune.lora.r) if finetune.lora.enabled else None,
    )
    tokens = finetune.seq_length // finetune.seq_parallel
    element = 2 if half else 4
    layer = LAYER_ACTIVATION_FACTOR * tokens * shape.hidden * element // 2
    kept = 2 * element * tokens * shape.hidden // 2
    activations = layer + shape.layers * kept if finetune.gradient_checkpointing else shape.layers * layer
    head_tokens = min(finetune.head_chunk_tokens, tokens)
    return (
        MemoryItem(label="weights", num_bytes=weights),
        MemoryItem(label="gradient", num_bytes=gradient),
        MemoryItem(label="optimizer states", num_bytes=states),
        MemoryItem(label=f"activations ({tokens} tokens)", num_bytes=activations),
        MemoryItem(label=f"logits ({head_tokens} tokens)", num_bytes=2 * 4 * head_tokens * shape.vocab),
        MemoryItem(label="transfer buckets", num_bytes=int(2 * cfg.weights.bucket_mb * 2**20)),
        MemoryItem(label="runtime", num_bytes=RUNTIME_BYTES),
    )


def with_value(section: Any, key: str, value: Any) -> Any:
    """Return a copy of a section with one key changed. A dotted key changes a section inside."""
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: with_value(getattr(section, name), rest, value) if rest else value})


def what_would_fit(cfg: Config, world: WorldMap, shape: ModelShape, gpu_bytes: int, kind: str) -> str:
    """Describe the fewest changes that make a job of this kind fit its devices of `gpu_bytes` each."""
    if kind != "finetune":
        return _servers_that_fit(cfg, world, shape, gpu_bytes, kind)
    ranks, capacity = world.trainer_world_size, gpu_bytes * (1 - (utilization(cfg) if world.share_devices else 0.0))
    changed, changes = cfg, list[str]()
    for key, value in SMALLER_TRAINER:
        if key == "finetune.engine" and (ranks == 1 or engine_of(cfg, ranks) == value):
            continue
        following = with_value(changed, key, value)
        if following == changed:
            continue
        changed, changes = following, [*changes, f"{key}={str(value).lower()}"]
        if trainer_bytes(changed, shape, ranks) <= capacity:
            return f"it fits with {' '.join(changes)}"
    sharded = with_value(with_value(cfg, "finetune.gradient_checkpointing", True), "finetune.engine", "fsdp2")
    for more in (2**power for power in range(1, MAX_RANKS_POWER) if 2**power > ranks):
        if trainer_bytes(sharded, shape, more) <= capacity:
            return f"it fits on {more} trainer GPUs with finetune.engine=fsdp2 finetune.gradient_checkpointing=true"
    return "no number of GPUs makes it fit: shorten finetune.seq_length or take a smaller model"


def _servers_that_fit(cfg: Config, world: WorldMap, shape: ModelShape, gpu_bytes: int, kind: str) -> str:
    now = world.get(kind)[0].num_ranks
    for ranks in (2**power for power in range(1, MAX_RANKS_POWER) if 2**power > now):
        if sum(item.num_bytes for item in server_items(cfg, shape, kind, ranks)) <= gpu_bytes * utilization(cfg):
            return f"it fits with vllm_config.vllm_kwargs.tensor-parallel-size={ranks}"
    return "no number of GPUs makes it fit: raise gpu-memory-utilization or take a smaller model"


def trainer_bytes(cfg: Config, shape: ModelShape, ranks: int) -> int:
    return sum(item.num_bytes for item in trainer_items(cfg, shape, ranks))


def utilization(cfg: Config) -> float:
    """vLLM's share of the device's memory."""
    return float(_vllm(cfg, "gpu-memory-utilization", DEFAULT_UTILIZATION))


def _vllm(cfg: Config, key: str, default: Any) -> Any:
    return server_options(cfg).get(key, default)


def server_items(cfg: Config, shape: ModelShape, kind: str, ranks: int) -> tuple[MemoryItem, ...]:
    """Return what one device of a server holds in addition to the KV cache.

    Every rank stages a whole weight update. A server that has the GPU for itself stages it outside vLLM's share or in
    host memory. If it shares the GPU with a trainer, the staged update is part of vLLM's share.
    """
    whole = shape.parameters * _element(cfg)
    items: tuple[MemoryItem, ...] = (
        MemoryItem(label="weights", num_bytes=whole // ranks),
        MemoryItem(label="runtime", num_bytes=RUNTIME_BYTES),
    )
    if cfg.world.share_devices and kind == "actor_llm":
        items += (MemoryItem(label="staged update", num_bytes=whole),)
    return items


def kv_cache_bytes(cfg: Config, shape: ModelShape, kind: str, ranks: int, gpu_bytes: int) -> int:
    """Bytes of vLLM's share of one device that remain for the KV cache.

    Args:
        kind: `actor_llm` or `preprocessor_llm`.
        ranks: devices of the server.
        gpu_bytes: memory of one device.
    """
    held = sum(item.num_bytes for item in server_items(cfg, shape, kind, ranks))
    return max(int(gpu_bytes * utilization(cfg)) - held, 0)


def _element(cfg: Config) -> int:
    """Bytes of one weight, or of one element of a key or value, in a server."""
    return 4 if _vllm(cfg, "dtype", "bfloat16") in ("float32", "float") else 2


def server_plan(cfg: Config, shape: ModelShape, kind: str, ranks: int, num_servers: int, gpu_bytes: int) -> DevicePlan:
    """Return the plan of one device of a server with `ranks` devices of `gpu_bytes` each."""
    max_len = int(_vllm(cfg, "max-model-len", cfg.finetune.seq_length))
    cache = kv_cache_bytes(cfg, shape, kind, ranks, gpu_bytes)
    tokens = cache * ranks // shape.kv_bytes_per_token(_element(cfg))
    return DevicePlan(
        kind=kind,
        num_devices=ranks * num_servers,
        items=(*server_items(cfg, shape, kind, ranks), MemoryItem(label="KV cache", num_bytes=cache)),
        capacity=int(gpu_bytes * utilization(cfg)),
        note=f"{tokens:,} tokens of KV cache per server: {tokens // max_len} sequences of {max_len} tokens",
    )
