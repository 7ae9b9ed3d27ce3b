"""Estimates the memory of the trainer's and the servers' devices from the configuration and the model's shape.

The plan is made before the start. `training_memory` has the sums of a trainer rank.
"""

from itertools import product
from typing import Any

import msgspec

from pipelinerl.config.engine import engine_of, traits_of
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import (
    EXPERT_PARALLEL,
    MOST_ROLLOUTS,
    captured_sequences,
    max_model_len,
    sends_adapter,
    served_path,
    side_models,
)
from pipelinerl.plan.model_shape import ModelShape, find_model_shape
from pipelinerl.plan.training_memory import (
    GIB,
    RUNTIME_BYTES,
    SMALLEST_CHUNK,
    MemoryItem,
    engine_memory,
    lora_parameters,
    step_items,
)
from pipelinerl.weights.staging_memory import fits_on_device, reserve_bytes
from pipelinerl.world.map import WorldMap

DEFAULT_UTILIZATION = 0.92
"""vLLM's own default, where the configuration sets none."""
LARGER_CHUNKS = (1024, 512)
"""What `finetune.head_chunk_tokens=auto` chooses from, before `SMALLEST_CHUNK`."""
CHOSEN = ("gradient_checkpointing", "shard_gradients", "cpu_offload")
"""Keys of `finetune` that the plan chooses where they are auto."""
SURE = 0.85
"""Share of a GPU that a choice may fill. A step has held 1.12 times its plan on an H200."""
NEARLY_FULL = 0.95
"""Measured peaks are 0.95 to 1.02 of the plan (docs/testing.md)."""
VLLM_BATCH = {"max-num-batched-tokens": 8192, "max-num-seqs": 256}
"""vLLM's options that bound its activations, with its defaults."""


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one GPU (or CPU slot) of the jobs of a kind."""

    kind: str
    num_devices: int
    items: tuple[MemoryItem, ...]
    capacity: int
    """Bytes of the device that this kind may use."""
    is_tight: bool = False
    """Whether it may not fit although its sum does: a trainer nearly full, a cache without a whole sequence."""
    note: str = ""

    @property
    def total(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def memory_plan(cfg: Config, world: WorldMap, shape: ModelShape, gpu_bytes: int) -> tuple[DevicePlan, ...]:
    """Return the plans of the trainer's and the servers' devices. `gpu_bytes` is the memory of one GPU."""
    ranks, wanted = world.trainer_world_size, cfg
    cfg = with_choices(cfg, shape, ranks, gpu_bytes)
    trainer = trainer_items(cfg, shape, ranks)
    total = sum(item.num_bytes for item in trainer)
    share = utilization(cfg) if world.share_devices else 0.0
    capacity = int(gpu_bytes * (1 - share))
    plan = DevicePlan(
        kind="finetune",
        num_devices=ranks,
        items=trainer,
        capacity=capacity,
        is_tight=total > NEARLY_FULL * capacity,
        note=_trainer_note(cfg, shape, world, gpu_bytes, total, share) + _chosen(wanted, cfg, shape),
    )
    return (plan, *server_plans(cfg, world, shape, gpu_bytes))


def server_plans(cfg: Config, world: WorldMap, shape: ModelShape, gpu_bytes: int) -> list[DevicePlan]:
    """Return the plans of the servers' devices alone."""
    plans = list[DevicePlan]()
    for kind in ("actor_llm", "preprocessor_llm"):
        servers = world.get(kind)
        if servers:
            served = _served_shape(cfg, shape, kind)
            plan = server_plan(cfg, served, kind, servers[0].num_ranks, len(servers), gpu_bytes)
            if kind == "actor_llm":
                on_node = max(
                    sum(job.num_ranks for job in world.on_node(node.rank) if job.kind == kind) for node in world.nodes
                )
                note = _staging_note(cfg, world, shape, gpu_bytes, on_node)
                plan = msgspec.structs.replace(plan, note=plan.note + note)
            elif _averages(cfg) and not cfg.world.share_devices:
                kept = average_bytes(cfg, shape, servers[0].num_ranks)
                note = f"; an average of the policy takes {kept / GIB:.1f} GiB more per GPU, or of its host's memory"
                plan = msgspec.structs.replace(plan, note=plan.note + note)
            plans.append(plan)
    return plans


def _served_shape(cfg: Config, policy: ModelShape, kind: str) -> ModelShape:
    """The largest model in servers of this kind. A reference, teacher or judge of unknown shape counts as policy."""
    if kind == "actor_llm":
        return policy
    shapes = [find_model_shape(served_path(cfg, model)) or policy for model in side_models(cfg)]
    return max(shapes, key=lambda shape: shape.parameters, default=policy)


def _trainer_note(cfg: Config, shape: ModelShape, world: WorldMap, gpu_bytes: int, total: int, share: float) -> str:
    ranks, nodes = world.trainer_world_size, len(world.get("finetune"))
    host, staged = host_bytes(cfg, shape, nodes), snapshot_bytes(cfg, shape, nodes)
    note = f"{engine_memory(cfg, ranks)}, {ranks} rank(s), {host / GIB:.0f} GiB of pinned host memory per node"
    note += f", {staged / GIB:.1f} GiB of it for updates on their way to servers"
    if offloaded := engine_memory(cfg, ranks).host_bytes(shape.parameters, _trained(cfg, shape)):
        note += f", and {offloaded * ranks // nodes / GIB:.0f} GiB of weights, gradients and optimizer states there"
    if share:
        largest = max((gpu_bytes - total) / gpu_bytes, 0.0)
        note += f"; leaves the server gpu-memory-utilization ≤ {largest:.2f}"
    return note


def _chosen(wanted: Config, cfg: Config, shape: ModelShape) -> str:
    """Describe what the plan has chosen for `auto`."""
    found = {key: getattr(cfg.finetune, key) for key in CHOSEN}
    if not isinstance(found["gradient_checkpointing"], bool | str):
        found["gradient_checkpointing"] = f"{found['gradient_checkpointing']} (of {shape.layers} layers)"
    chosen = [f"{key}={str(v).lower()}" for key, v in found.items() if getattr(wanted.finetune, key) == "auto"]
    return f"; chosen: {', '.join(chosen)}" if chosen else ""


def _trained(cfg: Config, shape: ModelShape) -> int | None:
    """Number of trained parameters. None: all."""
    lora = cfg.finetune.lora
    return lora_parameters(shape, lora.r) if lora.enabled else None


def trainer_items(cfg: Config, shape: ModelShape, ranks: int, *, cuda: bool = True) -> tuple[MemoryItem, ...]:
    """Return what one of `ranks` trainer ranks holds at its peak. `cuda`: on a GPU."""
    memory, trained = engine_memory(cfg, ranks), _trained(cfg, shape)
    _, _, states = memory.state_bytes(shape.parameters, trained)
    items = (
        MemoryItem(label="weights", num_bytes=memory.weight_bytes(shape, trained)),
        MemoryItem(label="gradient", num_bytes=memory.gradient_bytes(shape, trained)),
        MemoryItem(label="optimizer states", num_bytes=states),
        *step_items(shape, memory, cuda=cuda),
    )
    if not cuda:
        return items
    return (
        *items,
        MemoryItem(label="transfer buckets", num_bytes=int(2 * cfg.weights.bucket_mb * 2**20)),
        MemoryItem(label="runtime", num_bytes=RUNTIME_BYTES),
    )


def host_bytes(cfg: Config, shape: ModelShape, nodes: int) -> int:
    """Return the pinned host memory of a trainer node while a checkpoint is written, with the exported model."""
    return snapshot_bytes(cfg, shape, nodes) + checkpoint_bytes(cfg, shape) // nodes


def node_host_bytes(cfg: Config, world: WorldMap, shape: ModelShape, gpu_bytes: int, node: int) -> dict[str, int]:
    """Return the host memory that the plan counts on one node, by what it is for."""
    all_ranks, here = world.trainer_world_size, world.on_node(node)
    cfg = with_choices(cfg, shape, all_ranks, gpu_bytes)
    ranks = sum(job.num_ranks for job in here if job.kind == "finetune")
    serving = [job.num_ranks for job in here if job.kind == "actor_llm"]
    staged = [
        staged_bytes(cfg, shape, num) * num for num in serving if not _stages_on_gpu(cfg, world, shape, gpu_bytes)
    ]
    return {
        "versions and a checkpoint": host_bytes(cfg, shape, len(world.get("finetune"))) if ranks else 0,
        "offloaded states": ranks * engine_memory(cfg, all_ranks).host_bytes(shape.parameters, _trained(cfg, shape)),
        "staged updates": sum(staged),
    }


def checkpoint_bytes(cfg: Config, shape: ModelShape) -> int:
    """Return what a checkpoint with the exported model takes: weights and moments of what is trained in float32."""
    trained = _trained(cfg, shape)
    states = 12 * (shape.parameters if trained is None else trained)
    return states + shape.parameters * _sent_element(cfg)


def snapshot_bytes(cfg: Config, shape: ModelShape, nodes: int) -> int:
    """Return what a trainer node's ranks hold for servers: two versions. A pull or a delta needs the older one."""
    return 2 * version_bytes(cfg, shape) // nodes


def sent_parameters(cfg: Config, shape: ModelShape) -> int:
    """Number of parameters in a weight update: those of the adapter, or all."""
    return lora_parameters(shape, cfg.finetune.lora.r) if sends_adapter(cfg) else shape.parameters


def version_bytes(cfg: Config, shape: ModelShape) -> int:
    """Bytes of one weight version as it is sent."""
    return sent_parameters(cfg, shape) * _sent_element(cfg)


def _sent_element(cfg: Config) -> int:
    """Bytes of one parameter that the trainer sends or exports, in its own dtype."""
    return 4 if cfg.finetune.dtype == "float32" else 2


def with_value(section: Any, key: str, value: Any) -> Any:
    """Return a copy of a section with one key changed. A dotted key changes a section or mapping inside."""
    name, _, rest = key.partition(".")
    if isinstance(section, dict):
        return {**section, key: value}
    return section.model_copy(update={name: with_value(getattr(section, name), rest, value) if rest else value})


def trainer_bytes(cfg: Config, shape: ModelShape, ranks: int) -> int:
    return sum(item.num_bytes for item in trainer_items(cfg, shape, ranks))


def trainer_capacity(cfg: Config, gpu_bytes: int) -> int:
    """Bytes of a GPU that the trainer may use, which may share it with a server."""
    return int(gpu_bytes * (1 - (utilization(cfg) if cfg.world.share_devices else 0.0)))


def with_choices(cfg: Config, shape: ModelShape | None, ranks: int, gpu_bytes: int | None) -> Config:
    """Return the configuration with the plan's choices for the keys `CHOSEN`.

    The first that surely fits: rather compute again than reduce gradients more often, and rather that than keep weights
    in host memory. Not `selective`: on an H200 it was 0.62 to 1.11 times as fast as true, because Python looks at every
    operation.

    Args:
        shape: None = not known. Then everything is computed again, and nothing is sharded more or offloaded.
        gpu_bytes: memory of one GPU. None = the trainer runs on a CPU, as for an unknown shape.
    """
    finetune, reads = cfg.finetune, traits_of(engine_of(cfg, ranks)).reads
    options = []
    for key in CHOSEN:
        automatic = [False, True] if key in reads else [False]
        if key == "gradient_checkpointing":
            automatic = [False, *range(1, shape.layers if shape else 1), True]
        options.append(automatic if getattr(finetune, key) == "auto" else [getattr(finetune, key)])

    def choice(values: tuple[Any, ...]) -> Config:
        return with_value(cfg, "finetune", finetune.model_copy(update=dict(zip(CHOSEN, values, strict=True))))

    if shape is None or gpu_bytes is None:
        return choice((options[0][-1], options[1][0], options[2][0]))
    room = trainer_capacity(cfg, gpu_bytes)
    is_auto = finetune.gradient_checkpointing == "auto" and finetune.head_chunk_tokens == "auto"

    def fits(choice: Config) -> bool:
        if is_auto and choice.finetune.gradient_checkpointing is not True:  # small chunks take longer than a layer
            choice = with_value(choice, "finetune.head_chunk_tokens", LARGER_CHUNKS[0])
        return trainer_bytes(choice, shape, ranks) <= SURE * room

    smallest = choice(tuple(values[-1] for values in options))
    if trainer_bytes(smallest, shape, ranks) > room:
        return smallest
    choices = (choice(values[::-1]) for values in product(*reversed(options)))
    return next(filter(fits, choices), smallest)


def head_chunk(cfg: Config, shape: ModelShape | None, ranks: int, gpu_bytes: int | None) -> int:
    """Return the tokens whose logits the output head holds at one time.

    For auto this is the largest of `LARGER_CHUNKS` with which the planned memory fits, else `SMALLEST_CHUNK`.
    ``shape`` and ``gpu_bytes``: as in `with_choices`.
    """
    wanted = cfg.finetune.head_chunk_tokens
    if wanted != "auto":
        return wanted
    if shape is None or gpu_bytes is None:
        return SMALLEST_CHUNK
    capacity = trainer_capacity(cfg, gpu_bytes)
    fitting = (
        chunk
        for chunk in LARGER_CHUNKS
        if trainer_bytes(with_value(cfg, "finetune.head_chunk_tokens", chunk), shape, ranks) <= capacity
    )
    return next(fitting, SMALLEST_CHUNK)


def utilization(cfg: Config) -> float:
    """vLLM's share of the device's memory."""
    return float(_vllm(cfg, "gpu-memory-utilization", DEFAULT_UTILIZATION))


def _vllm(cfg: Config, key: str, default: Any) -> Any:
    value = cfg.vllm_config.vllm_kwargs.get(key)
    return default if value is None else value


def server_items(cfg: Config, shape: ModelShape, kind: str, ranks: int) -> tuple[MemoryItem, ...]:
    """Return what one device of a server holds in addition to the KV cache."""
    items: tuple[MemoryItem, ...] = (
        MemoryItem(label="weights", num_bytes=_server_weights(cfg, shape, ranks) * _element(cfg)),
        MemoryItem(label="activations", num_bytes=_server_activations(cfg, shape, ranks)),
        MemoryItem(label="runtime", num_bytes=RUNTIME_BYTES),
    )
    if kind == "actor_llm" and sends_adapter(cfg):
        items += (MemoryItem(label="adapter", num_bytes=sent_parameters(cfg, shape) * _element(cfg)),)
    # A server that has the GPU for itself stages outside vLLM's share.
    if cfg.world.share_devices and kind == "actor_llm":
        items += (MemoryItem(label="staged update", num_bytes=staged_bytes(cfg, shape, ranks)),)
    if cfg.world.share_devices and kind == "preprocessor_llm" and _averages(cfg):
        items += (MemoryItem(label="staged update and average", num_bytes=average_bytes(cfg, shape, ranks)),)
    return items


def staged_bytes(cfg: Config, shape: ModelShape, ranks: int) -> int:
    """Bytes of an update that one of a server's devices stages: the version, or its own shard of it. Of an adapter all.

    A loader that computes instead of copying needs whole tensors, which this estimate leaves out.
    """
    return version_bytes(cfg, shape) if sends_adapter(cfg) else _server_weights(cfg, shape, ranks) * _sent_element(cfg)


def average_bytes(cfg: Config, shape: ModelShape, ranks: int) -> int:
    """Bytes that a device of a teacher that averages the policy keeps beside its weights.

    8 per weight: a version and its average in float32, or both in 16 bits and the average in float32.
    """
    return 8 * _server_weights(cfg, shape, ranks)


def _averages(cfg: Config) -> bool:
    return any(teacher.ema is not None for teacher in cfg.teachers)


def _staging_note(cfg: Config, world: WorldMap, shape: ModelShape, gpu_bytes: int, on_node: int) -> str:
    """Where a server of its own GPUs stages updates, with the sum of a node that has ``on_node`` of its devices."""
    if cfg.world.share_devices:
        return ""
    staged = staged_bytes(cfg, shape, world.get("actor_llm")[0].num_ranks)
    transport = world.transfer_backend(cfg.weights.backend)
    place = "beside vLLM's share" if _stages_on_gpu(cfg, world, shape, gpu_bytes) else "in pinned host memory"
    note = f"; an update is staged {place}: {staged / GIB:.1f} GiB per GPU, {on_node * staged / GIB:.0f} GiB per node"
    return f"{note}, {reserve_bytes(transport) / GIB:.1f} GiB of the GPU are left to communicators and others"


def _stages_on_gpu(cfg: Config, world: WorldMap, shape: ModelShape, gpu_bytes: int) -> bool:
    """Whether servers stage updates on their GPUs. A shared GPU has room for them in vLLM's share."""
    staged = staged_bytes(cfg, shape, world.get("actor_llm")[0].num_ranks)
    free = int(gpu_bytes * (1 - utilization(cfg)))
    return cfg.world.share_devices or fits_on_device(staged, free, world.transfer_backend(cfg.weights.backend))


def _server_weights(cfg: Config, shape: ModelShape, ranks: int) -> int:
    """Parameters on one of a server's devices. With expert parallelism devices hold whole experts, some one more."""
    experts = shape.expert_parameters
    if experts and _vllm(cfg, EXPERT_PARALLEL, False) in (True, ""):
        return (shape.parameters - experts) // ranks + experts // shape.experts * -(-shape.experts // ranks)
    return shape.parameters // ranks


def _server_activations(cfg: Config, shape: ModelShape, ranks: int) -> int:
    """Bytes of a step of vLLM's largest batch: a layer's inputs and products, and float32 logits of all sequences."""
    tokens, sequences = (int(_vllm(cfg, key, default)) for key, default in VLLM_BATCH.items())
    width = 2 * shape.hidden + 3 * shape.intermediate * shape.active_experts // ranks
    return _element(cfg) * tokens * width + 3 * 4 * sequences * shape.vocab


def kv_cache_bytes(cfg: Config, shape: ModelShape, kind: str, ranks: int, gpu_bytes: int) -> int:
    """Bytes of vLLM's share of one device that remain for the KV cache of a server of ``ranks`` devices.

    ``kind``: `actor_llm` or `preprocessor_llm`.
    """
    held = sum(item.num_bytes for item in server_items(cfg, shape, kind, ranks))
    return max(int(gpu_bytes * utilization(cfg)) - held, 0)


def cached_tokens(cfg: Config, shape: ModelShape, kind: str, ranks: int, gpu_bytes: int) -> int:
    """Tokens that the KV cache of a server holds. The arguments are those of `kv_cache_bytes`."""
    cache = kv_cache_bytes(cfg, shape, kind, ranks, gpu_bytes)
    return cache * ranks // shape.kv_bytes_per_token(_element(cfg))


def planned_rollouts(cfg: Config, shape: ModelShape, ranks: int, gpu_bytes: int) -> int:
    """Rollouts at a time with which a policy server's cache is not full even if all are as long as they may be."""
    longest = max_model_len(cfg) or cfg.finetune.seq_length
    return min(max(cached_tokens(cfg, shape, "actor_llm", ranks, gpu_bytes) // longest, 1), MOST_ROLLOUTS)


def _element(cfg: Config) -> int:
    """Bytes of one weight, or of one element of a key or value, in a server."""
    return 4 if _vllm(cfg, "dtype", "bfloat16") in ("float32", "float") else 2


def server_plan(cfg: Config, shape: ModelShape, kind: str, ranks: int, num_servers: int, gpu_bytes: int) -> DevicePlan:
    """Return the plan of one device of a server with `ranks` devices of `gpu_bytes` each."""
    max_len = max_model_len(cfg) or cfg.finetune.seq_length
    cache = kv_cache_bytes(cfg, shape, kind, ranks, gpu_bytes)
    tokens = cached_tokens(cfg, shape, kind, ranks, gpu_bytes)
    graphs = captured_sequences(cfg) if kind == "actor_llm" else None
    return DevicePlan(
        kind=kind,
        num_devices=ranks * num_servers,
        items=(*server_items(cfg, shape, kind, ranks), MemoryItem(label="KV cache", num_bytes=cache)),
        capacity=int(gpu_bytes * utilization(cfg)),
        is_tight=tokens < max_len,  # vLLM refuses it, but for windows and other layers of which a cache keeps less
        note=f"{tokens:,} tokens of KV cache per server: {tokens // max_len} sequences of {max_len} tokens"
        + (f"; CUDA graphs for decoding up to {graphs} sequences" if graphs else ""),
    )
