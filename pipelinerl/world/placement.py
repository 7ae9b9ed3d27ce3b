"""Which job runs on which devices: a pure function of the ``world`` section and the cluster.

Servers fill the nodes from node 0, each inside one node or on ``world.nodes_per_server`` in a row. The trainer takes
the remaining devices of every node in whole sequence-parallel groups. Roles without a device run on its nodes. Every
device is used once, or with ``world.share_devices`` by a server and the trainer.
"""

import msgspec

from pipelinerl.config.environment_servers import EnvironmentServer, count_replicas, environment_servers
from pipelinerl.config.sections import Config, WorldSection
from pipelinerl.config.servers import devices_per_node, devices_per_server, side_models
from pipelinerl.errors import WorldError
from pipelinerl.world.cluster import Cluster, Node

SERVER_KINDS = ("actor_llm", "preprocessor_llm")
PARTS = {kind: f"{kind}_part" for kind in SERVER_KINDS}
"""Kinds of the roles with the workers of a server on its nodes after the first."""
CPU_KINDS = ("redis", "actor", "preprocessor", "verifier", "environment")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a configuration on which the placement depends."""

    world: WorldSection
    environments: tuple[EnvironmentServer, ...] = ()
    gpus_per_llm: int = 1
    seq_parallel: int = 1
    redis: bool = False
    side_models: int = 1
    """Models that the servers of kind `preprocessor_llm` have to serve."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Number of servers of each kind. The trainer gets the remaining devices."""

    actor_llms: int
    preprocessor_llms: int


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and cores of one job."""

    kind: str
    replica_idx: int
    node_rank: int
    devices: tuple[int, ...] = ()
    """Local device numbers: GPUs or CPU slots."""
    cores: tuple[int, ...] = ()
    serves: int = 0
    """Servers: the replica of the actor (preprocessor) that uses it."""
    first_rank: int = 0
    """Trainer: global rank of its first process."""
    environment: EnvironmentServer | None = None
    """Environment: the entry of `environments` that it serves."""
    server: str = ""
    """Servers on several nodes: name of the job on their first one."""
    server_node: int = 0
    """Likewise: which of its nodes this is."""

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.replica_idx}"


def request_from_config(cfg: Config) -> Request:
    elsewhere = bool(cfg.debug.existing_llms)  # the parallel sizes are those of other machines
    if not elsewhere:
        devices_per_node(cfg, cfg.world.nodes_per_server)
    return Request(
        world=cfg.world,
        environments=environment_servers(cfg),
        gpus_per_llm=1 if elsewhere else devices_per_server(cfg),
        seq_parallel=1 if elsewhere else cfg.finetune.seq_parallel,
        redis=cfg.streams.backend == "redis" and not cfg.streams.external,
        side_models=max(len(side_models(cfg)), 1),
    )


def place(request: Request, cluster: Cluster) -> tuple[Placement, ...]:
    """Place all jobs of the world: servers first, then the trainer, then the roles without a device.

    Raises:
        WorldError: it cannot be placed, with the numbers.
    """
    free = {node.rank: list(range(node.devices)) for node in cluster.nodes}
    split = split_devices(request, cluster)
    servers = _place_servers(request, cluster, split, free)
    if request.world.share_devices:
        free = {node.rank: list(range(node.devices)) for node in cluster.nodes}
    trainers = _place_trainers(request, cluster, free)
    if not trainers:
        raise WorldError(
            f"{_size(cluster)} and {len(servers)} server(s) of {request.gpus_per_llm} leave no group of "
            f"finetune.seq_parallel={request.seq_parallel} devices for the trainer: raise world.finetune_fraction, "
            "lower the parallel sizes, or set world.share_devices=true"
        )
    return (*servers, *trainers, *_place_cpu_roles(request, cluster, trainers, split.actor_llms))


def idle_devices(placements: tuple[Placement, ...], cluster: Cluster) -> int:
    """Number of devices that no job uses, because they do not fill a parallel group."""
    used = {(p.node_rank, device) for p in placements for device in p.devices}
    return cluster.total_devices - len(used)


def split_devices(request: Request, cluster: Cluster) -> Split:
    """Compute the numbers of servers from the fractions.

    Shares are rounded down to whole servers. A kind with a positive fraction gets at least one.
    """
    world, size = request.world, request.gpus_per_llm
    if world.actor_fraction == 0 or (world.finetune_fraction == 0 and not world.share_devices):
        raise WorldError(
            f"world.actor_fraction={world.actor_fraction} and world.finetune_fraction={world.finetune_fraction}: "
            "both must be positive, a run needs a server and a trainer"
        )
    trainer_share = 0 if world.share_devices else world.finetune_fraction
    parts = world.actor_fraction + world.preprocessor_fraction + trainer_share
    total = cluster.total_devices
    capacity = len(server_slots(request, cluster))
    actors = max(total * world.actor_fraction // (parts * size), 1)
    references = total * world.preprocessor_fraction // (parts * size)
    if world.preprocessor_fraction:
        references = max(references, request.side_models)
    if actors + references > capacity:
        references = references and max(capacity * references // (actors + references), request.side_models)
        actors = capacity - references
    _check_servers(request, cluster, actors, references)
    return Split(actor_llms=actors, preprocessor_llms=references)


def _check_servers(request: Request, cluster: Cluster, actors: int, references: int) -> None:
    world, size = request.world, request.gpus_per_llm
    nodes = f" on {world.nodes_per_server} nodes" if world.nodes_per_server > 1 else ""
    numbers = f"{_size(cluster)}, {size} device(s) per server (tensor × pipeline parallel){nodes}"
    if actors < 1:
        raise WorldError(
            f"{numbers}: no room for a policy server"
            + (f" and {references} reference server(s)" if references else "")
            + ". Lower tensor-parallel-size or pipeline-parallel-size, use larger nodes, or raise "
            "world.nodes_per_server"
        )
    for key, servers in (("actor", actors), ("preprocessor", references)):
        if 0 < servers < world.replicas:
            raise WorldError(
                f"{numbers}: world.replicas={world.replicas} need at least as many {key}_llm servers, but "
                f"world.{key}_fraction={getattr(world, f'{key}_fraction')} gives {servers}: lower the first or raise "
                "the second"
            )
    if 0 < references < world.replicas * request.side_models:
        raise WorldError(
            f"{numbers}: {request.side_models} models (the reference, `teachers` and `judges`) need a server each for "
            f"every one of world.replicas={world.replicas}, but "
            f"world.preprocessor_fraction={world.preprocessor_fraction} gives {references}: raise it, or lower the "
            "replicas"
        )


def _place_servers(
    request: Request, cluster: Cluster, split: Split, free: dict[int, list[int]]
) -> tuple[Placement, ...]:
    placements: list[Placement] = []
    slots = iter(server_slots(request, cluster))
    per_node = request.gpus_per_llm // request.world.nodes_per_server
    for kind, count in zip(SERVER_KINDS, (split.actor_llms, split.preprocessor_llms), strict=True):
        for index in range(count):
            nodes = next(slots)
            for number, node in enumerate(nodes):
                devices = tuple(free[node.rank][:per_node])
                del free[node.rank][:per_node]
                placements.append(
                    Placement(
                        kind=PARTS[kind] if number else kind,
                        replica_idx=index * (len(nodes) - 1) + number - 1 if number else index,
                        node_rank=node.rank,
                        devices=devices,
                        cores=device_cores(node, devices),
                        serves=index * request.world.replicas // count,
                        server=f"{kind}_{index}" if len(nodes) > 1 else "",
                        server_node=number,
                    )
                )
    return tuple(placements)


def server_slots(request: Request, cluster: Cluster) -> list[tuple[Node, ...]]:
    """Return the nodes of every server for which there is room, node 0 first."""
    number = request.world.nodes_per_server
    groups = [cluster.nodes[first : first + number] for first in range(0, len(cluster.nodes) - number + 1, number)]
    per_node = request.gpus_per_llm // number
    return [group for group in groups for _ in range(min(node.devices for node in group) // per_node)]


def _place_trainers(request: Request, cluster: Cluster, free: dict[int, list[int]]) -> tuple[Placement, ...]:
    """One trainer job per node that has a whole sequence-parallel group left."""
    placements: list[Placement] = []
    first_rank = 0
    for node in cluster.nodes:
        usable = len(free[node.rank]) // request.seq_parallel * request.seq_parallel
        if usable == 0:
            continue
        devices = tuple(free[node.rank][:usable])
        placements.append(
            Placement(
                kind="finetune",
                replica_idx=len(placements),
                node_rank=node.rank,
                devices=devices,
                cores=device_cores(node, devices),
                first_rank=first_rank,
            )
        )
        first_rank += usable
    return tuple(placements)


def _place_cpu_roles(
    request: Request, cluster: Cluster, trainers: tuple[Placement, ...], policy_servers: int
) -> tuple[Placement, ...]:
    """Place replica i of each role on the i-th node, with trainer nodes first. Redis runs on node 0."""
    beside = {trainer.node_rank for trainer in trainers}
    nodes = sorted(cluster.nodes, key=lambda node: (node.rank not in beside, node.rank))
    environments = [
        server for server in request.environments for _ in range(count_replicas(server, request.world, policy_servers))
    ]
    counts = {
        "redis": int(request.redis),
        "actor": request.world.replicas,
        "preprocessor": request.world.replicas,
        "verifier": request.world.verifier_replicas,
        "environment": len(environments),
    }
    placements: list[Placement] = []
    for kind in CPU_KINDS:
        for index in range(counts[kind]):
            node = cluster.nodes[0] if kind == "redis" else nodes[index % len(nodes)]
            served = environments[index] if kind == "environment" else None
            # All cores: on the trainer's alone they would wait for its steps, and it for their data.
            placements.append(
                Placement(kind=kind, replica_idx=index, node_rank=node.rank, cores=node.cores, environment=served)
            )
    return tuple(placements)


def device_cores(node: Node, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Cores of the given CPU slots, an equal part of the node's for each. Fewer cores than slots are shared."""
    if not node.cores:
        return ()
    count = len(node.cores)
    cores: set[int] = set()
    for slot in slots:
        start, end = slot * count // node.devices, (slot + 1) * count // node.devices
        cores.update(node.cores[start : max(end, start + 1)])
    return tuple(sorted(cores))


def _size(cluster: Cluster) -> str:
    unit = "GPU(s)" if cluster.accelerator == "cuda" else "CPU slot(s)"
    counts = sorted({node.devices for node in cluster.nodes})
    per_node = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{len(cluster.nodes)} node(s) with {per_node} {unit} each ({cluster.total_devices} in total)"
