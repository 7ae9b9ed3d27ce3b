"""What makes a world fit its GPUs: changes of the configuration that the memory plan itself has tried.

Consumes what the plan does. Pure: nothing is measured, and nothing named that the plan or a rule refuses.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Any

import msgspec

from pipelinerl.config.engine import check_ranks
from pipelinerl.config.rules import check_rules
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import devices_per_server, parallel_sizes, side_models
from pipelinerl.errors import ConfigError, WorldError
from pipelinerl.plan.memory import (
    NEARLY_FULL,
    memory_plan,
    node_host_bytes,
    server_plans,
    trainer_bytes,
    with_choices,
    with_value,
)
from pipelinerl.plan.model_shape import ModelShape
from pipelinerl.plan.training_memory import GIB
from pipelinerl.world.cluster import Cluster, Node
from pipelinerl.world.map import WorldMap, map_world
from pipelinerl.world.placement import SERVER_KINDS

Changes = dict[str, Any]
UTILIZATION = "vllm_config.vllm_kwargs.gpu-memory-utilization"
TENSOR_PARALLEL = "vllm_config.vllm_kwargs.tensor-parallel-size"
SHARES = (0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2)
"""Utilizations that are tried where a trainer shares the GPU. The first that fits has the largest KV cache."""
ALONE = (0.9, 0.95)
"""Those that are tried where a server has its GPUs for itself: the rest holds CUDA's context and communicators."""
EIGHTHS = range(8, 0, -1)
"""Of the most servers of a size: the numbers that are tried."""
SIZES = (1, 2, 4, 8, 1 / 2, 1 / 4, 1 / 8)
"""Times the present tensor parallel size: those that are tried."""
LARGEST = (8, 8)
"""Nodes, and GPUs of each, of the largest machine that is proposed."""
LORA: Changes = {"finetune.lora.enabled": True}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the machine that a world is planned for."""

    shape: ModelShape
    nodes: tuple[Node, ...]
    gpu_bytes: int
    host_bytes: int = 2 * 2**40
    """Memory of a node. Where it is not known, that of AWS p5 and Azure ND H100 v5, which have eight GPUs."""
    kinds: Collection[str] = ("finetune", *SERVER_KINDS)
    """The kinds of jobs whose GPUs count."""


def advice(cfg: Config, target: Target) -> str:
    """Describe the first changes with which the world fits, or else another experiment and a larger machine that do."""
    if found := proposal(cfg, target):
        return f"it {_described(cfg, target, found)}"
    others = list[str]()
    if found := proposal(cfg, target, LORA):
        others.append(f"as another experiment, LoRA {_described(cfg, target, found)}")
    for larger, keys in _larger(target):
        if found := proposal(cfg, larger, keys):
            others.append(f"on a larger machine the same {_described(cfg, larger, found)}")
            break
    return "; ".join(others) or "nothing here makes it fit: shorten finetune.seq_length or take a smaller model"


def proposal(cfg: Config, target: Target, first: Changes | None = None) -> Changes | None:
    """Return the changes that make the world fit: `first`, and the cheapest of `steps`. None: none do.

    A step is taken only where no combination of the steps before it is enough.
    """
    first = first or {}
    given = _changed(cfg, first)
    found = next((each for each in _combinations(given, target) if fits(_changed(given, each), target)), None)
    return None if found is None else {**first, **_needed(given, found, target)}


def _combinations(cfg: Config, target: Target) -> Iterator[Changes]:
    """Yield what the steps change together. The servers vary first, the dearest step last."""
    shares, layouts, *training = steps(cfg, target)
    serving = [{**share, **layout} for layout, share in product(layouts, shares)]
    serving = [changes for changes in serving if _serves(_changed(cfg, changes), target)]
    for choice in product(*reversed(training)):
        trained = {key: value for step in reversed(choice) for key, value in step.items()}
        if _trains(_changed(cfg, trained), target):
            yield from ({**served, **trained} for served in serving)


def _needed(cfg: Config, changes: Changes, target: Target) -> Changes:
    """The changes without what a step brings beside the cure. A fraction alone is another split."""
    for key in tuple(changes):
        fewer = {each: value for each, value in changes.items() if each != key}
        without = _changed(cfg, fewer)
        if without == _changed(cfg, changes) or (not key.endswith("fraction") and fits(without, target)):
            changes = fewer
    return changes


def steps(cfg: Config, target: Target) -> Iterator[list[Changes]]:
    """Yield what each step may change, the cheapest step first. Every step may change nothing."""
    finetune, sharded = cfg.finetune, {"finetune.engine": "fsdp2", "finetune.shard_gradients": "auto"}
    smaller = range(2, min(_devices(target), LARGEST[1]) + 1)  # odd numbers of ranks have odd divisors
    yield [{}, *({UTILIZATION: share} for share in (SHARES if cfg.world.share_devices else ALONE))]
    yield [{}, *_splits(cfg, target)]
    yield [{}, sharded, *({**sharded, "finetune.expert_ranks": n} for n in smaller if target.shape.experts % n == 0)]
    yield [{}, *([{"finetune.gradient_checkpointing": "auto"}] if finetune.gradient_checkpointing != "auto" else [])]
    yield [{}, {**sharded, "finetune.cpu_offload": True}]
    yield [{}, *({"finetune.seq_parallel": n} for n in smaller if n > finetune.seq_parallel)]


def _splits(cfg: Config, target: Target) -> Iterator[Changes]:
    """Servers of other sizes, and fewer of them, whose GPUs the trainer gets."""
    world = _mapped(cfg, target)
    if world is None:
        return
    devices, (now, _) = _devices(target), parallel_sizes(cfg)
    servers, sides = len(world.get("actor_llm")), len(world.get("preprocessor_llm"))
    for factor in SIZES:
        parallel, size = int(now * factor), int(devices_per_server(cfg) * factor)
        if parallel != now * factor or size > devices or not target.shape.splits_over(parallel):
            continue
        sized = {TENSOR_PARALLEL: parallel}
        if cfg.world.share_devices:
            yield sized
            continue
        others = max(int(sides / factor), len(side_models(cfg))) if sides else 0
        for number in dict.fromkeys(max(int(servers / factor) * eighth // 8, 1) for eighth in EIGHTHS):
            serving, scoring = size * number, size * others
            if devices > serving + scoring:
                scored = {"world.preprocessor_fraction": scoring} if sides else {}
                training = {"world.finetune_fraction": devices - serving - scoring}
                yield {**sized, "world.actor_fraction": serving, **scored, **training}


def _devices(target: Target) -> int:
    return sum(node.devices for node in target.nodes)


def fits(cfg: Config, target: Target) -> bool:
    """Whether the plan of this world fits with room to spare, and no rule refuses it."""
    world = _mapped(cfg, target)
    if world is None:
        return False
    if _is_refused(check_ranks, cfg, world.trainer_world_size) or _is_refused(check_rules, cfg):
        return False
    chosen = with_choices(cfg, target.shape, world.trainer_world_size, target.gpu_bytes)
    plans = memory_plan(chosen, world, target.shape, target.gpu_bytes)
    if not all(plan.fits and not plan.is_tight for plan in plans if plan.kind in target.kinds):
        return False
    return _host_bytes(chosen, world, target) <= target.host_bytes


def _is_refused(check: Callable[..., None], *values: Any) -> bool:
    try:
        check(*values)
    except ConfigError:
        return True
    return False


def _trains(cfg: Config, target: Target) -> bool:
    """Whether no rule refuses the trainer, and one fits that has all GPUs. With fewer it needs no less of each."""
    if _is_refused(check_rules, cfg):
        return False
    if "finetune" not in target.kinds:
        return True
    ranks = _devices(target)
    chosen = with_choices(cfg, target.shape, ranks, target.gpu_bytes)
    return trainer_bytes(chosen, target.shape, ranks) <= NEARLY_FULL * target.gpu_bytes


def _serves(cfg: Config, target: Target) -> bool:
    """Whether the world can be placed and its servers fit, whatever the trainer does."""
    world = _mapped(cfg, target)
    if world is None:
        return False
    plans = server_plans(cfg, world, target.shape, target.gpu_bytes)
    return all(plan.fits and not plan.is_tight for plan in plans if plan.kind in target.kinds)


def _mapped(cfg: Config, target: Target) -> WorldMap | None:
    """The world on the target's nodes. None: it cannot be placed."""
    try:
        return map_world(cfg, Cluster(accelerator="cuda", nodes=target.nodes, identity="tried"), check=False)
    except (ConfigError, WorldError):
        return None


def _host_bytes(cfg: Config, world: WorldMap, target: Target) -> int:
    """Planned host memory of the node that needs the most."""
    nodes = (node_host_bytes(cfg, world, target.shape, target.gpu_bytes, node.rank) for node in world.nodes)
    return max(sum(parts.values()) for parts in nodes)


def _changed(cfg: Config, changes: Changes) -> Config:
    for key, value in changes.items():
        cfg = with_value(cfg, key, value)
    return cfg


def _larger(target: Target) -> Iterator[tuple[Target, Changes]]:
    """Yield machines of up to `LARGEST` nodes and GPUs per node, with the keys that describe them."""
    per_node, names = max(node.devices for node in target.nodes), [node.hostname for node in target.nodes]
    while per_node * len(names) < LARGEST[0] * LARGEST[1]:
        if per_node < LARGEST[1]:
            per_node = min(2 * per_node, LARGEST[1])
        else:
            names = [f"node{rank}" for rank in range(min(2 * len(names), LARGEST[0]))]
        hosts = {"world.hosts": names} if len(names) > 1 else {}
        nodes = tuple(Node(rank=rank, hostname=name, devices=per_node) for rank, name in enumerate(names))
        yield msgspec.structs.replace(target, nodes=nodes), {**hosts, "world.gpus_per_node": per_node}


def _described(cfg: Config, target: Target, found: Changes) -> str:
    """The changes as arguments of the launcher, behind the host memory that offloading takes."""
    then, needed = _changed(cfg, found), ""
    if then.finetune.cpu_offload is True and (world := _mapped(then, target)):
        needed = f" ({_host_bytes(then, world, target) / GIB:.0f} GiB of host memory per node)"
    return f"fits{needed} with {as_arguments(found)}"  # the arguments last, to be copied


def as_arguments(changes: Changes) -> str:
    """Changes as they are written on the command line."""
    return " ".join(
        f"'{key}=[{','.join(value)}]'"
        if isinstance(value, list)
        else f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in changes.items()
    )
