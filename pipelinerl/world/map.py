"""The world map: every job of a run with its node, devices, port and URL. The launcher writes it once.

All launchers of a run build the same map, except for cores. Leases (`pipelinerl.membership`) show which roles are alive
and which have joined since.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from pipelinerl.config.backends import TransportName
from pipelinerl.config.sections import Config
from pipelinerl.errors import WorldError
from pipelinerl.world.cluster import LOOPBACK, Cluster, Node, count_visible_gpus, read_cluster
from pipelinerl.world.disk import replace_file
from pipelinerl.world.network import LARGEST_PORT, check_ports, derive_port_base, find_port_block
from pipelinerl.world.placement import Placement, idle_devices, place, request_from_config

WORLD_FILE = Path("conf") / "world.json"
ANY_ADDRESS = "0.0.0.0"
BOUND_TO_DEVICES = ("nccl", "ipc")
"""Bucket transports of weights that only work in the world for which ``weight_backend`` names them."""
LISTENING_KINDS = ("redis", "actor_llm", "preprocessor_llm", "verifier", "environment")
WEIGHT_PORTS_PER_SERVER = 2
"""A server that returns gets a new transfer group, whose store must not wait for the old one's port."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One node's workers of a server that spans several nodes."""

    nodes: int
    """Nodes of the server. Each has the same number of its devices."""
    node: int
    """This node's number among them. Node 0 has the engine and the HTTP server, the others have workers only."""
    host: str
    """Address of node 0."""
    port: int
    """Port on node 0 where the workers meet."""

    @property
    def has_workers_only(self) -> bool:
        """Whether this node has workers only."""
        return self.node > 0

    @property
    def address(self) -> str:
        """Where the workers meet, as a URL. The nodes of one server have it in common."""
        return f"tcp://{self.host}:{self.port}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process tree that the launcher of its node starts."""

    name: str
    """``<kind>_<replica_idx>``, which is also the name of its folder in the run folder."""
    kind: str
    replica_idx: int = 0
    node_rank: int = 0
    hostname: str = LOOPBACK
    port: int | None = None
    gpus: tuple[int, ...] = ()
    """CUDA: indices into the GPUs that the node's launcher can use."""
    cores: tuple[int, ...] = ()
    """CPU: cores that the job is pinned to."""
    url: str = ""
    num_ranks: int = 1
    """finetune: trainer processes of this job. Servers: tensor × pipeline size, on all their nodes together."""
    first_rank: int = 0
    """finetune: global rank of its first process."""
    serves: int = 0
    """Servers: the replica of the actor (preprocessor) that sends requests to it."""
    span: Span | None = None
    """Servers: this node in one on several nodes. None = the server is on one node."""
    environment_key: str | None = None
    """environment: its `key` in `environments`."""
    environment_index: int | None = None
    """environment: its place in `environments`."""


class WorldMap(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs of a run."""

    accelerator: Literal["cpu", "cuda"]
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    master_port: int
    """Rendezvous of the trainer ranks, on ``master_addr``."""
    weight_port: int
    """First of ``weight_ports`` consecutive ports of the weight-transfer stores, on the node of trainer rank 0."""
    weight_ports: int
    share_devices: bool = False
    idle_devices: int = 0

    def job(self, name: str) -> Job:
        for job in self.jobs:
            if job.name == name:
                return job
        raise WorldError(f"no job {name!r} in this world; its jobs are {[job.name for job in self.jobs]}")

    def get(self, kind: str) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if job.kind == kind)

    def on_node(self, node_rank: int) -> tuple[Job, ...]:
        return tuple(job for job in self.jobs if job.node_rank == node_rank)

    def servers_of(self, job: Job) -> tuple[Job, ...]:
        """The inference servers that this actor (policy) or preprocessor (reference) uses."""
        return tuple(server for server in self.get(f"{job.kind}_llm") if server.serves == job.replica_idx)

    @property
    def master_addr(self) -> str:
        return self.get("finetune")[0].hostname

    @property
    def trainer_world_size(self) -> int:
        return sum(job.num_ranks for job in self.get("finetune"))

    @property
    def hosts(self) -> list[str]:
        """Names and addresses of all machines with a role of the run or an existing server of it."""
        return sorted({node.hostname for node in self.nodes} | {job.hostname for job in self.jobs})

    @property
    def is_open(self) -> bool:
        """Whether roles listen beyond their node: there are several nodes, or `world.hosts` names the only one."""
        hosts = {node.hostname for node in self.nodes}  # several Ray nodes of one machine share its address
        return len(hosts) > 1 or not is_loopback(self.nodes[0].hostname)

    @property
    def bind_host(self) -> str:
        """Address to listen on."""
        return ANY_ADDRESS if self.is_open else LOOPBACK

    @property
    def weight_backend(self) -> TransportName:
        """The backend that ``weights.backend=auto`` selects."""
        if self.accelerator == "cpu":
            return "tcp"
        if not self.share_devices:
            return "nccl"  # it cannot use one GPU twice
        return "ipc" if self._device_count == 1 else "tcp"  # IPC reaches only the GPU of trainer rank 0

    def transfer_backend(self, wanted: str) -> TransportName:
        """The backend for ``weights.backend=wanted``. With a store, a server's workers share what one has read by TCP.

        Raises:
            WorldError: the world's devices do not support it.
        """
        if wanted in BOUND_TO_DEVICES and wanted != self.weight_backend:
            kind = "a CPU world" if self.accelerator == "cpu" else f"a world of {self._device_count} GPU(s)"
            shared = f", world.share_devices={str(self.share_devices).lower()}"
            raise WorldError(f"weights.backend={wanted} cannot work in {kind}{shared}: use auto or tcp")
        if wanted == "store":
            return "tcp"
        return self.weight_backend if wanted == "auto" else wanted  # type: ignore[return-value]  # checked above

    @property
    def _device_count(self) -> int:
        return sum(node.devices for node in self.nodes)

    def get_actor_urls(self) -> list[str]:
        return [job.url for job in self.get("actor_llm")]

    def get_preprocessor_urls(self) -> list[str]:
        return [job.url for job in self.get("preprocessor_llm")]

    def get_all_jobs(self) -> list[Job]:
        return list(self.jobs)

    @property
    def total_finetune_gpus(self) -> int:
        return self.trainer_world_size

    def job_dicts(self) -> list[dict[str, Any]]:
        """``cfg.jobs`` for domains: ``Job(**job)`` rebuilds each. Verifiers also appear as "environment"."""
        jobs = [msgspec.to_builtins(job) for job in self.jobs]
        return jobs + [{**job, "kind": "environment"} for job in jobs if job["kind"] == "verifier"]

    def digest(self) -> str:
        """Digest of the world without cores, the same for all launchers of a run."""
        jobs = tuple(msgspec.structs.replace(job, cores=()) for job in self.jobs)
        nodes = tuple(msgspec.structs.replace(node, cores=()) for node in self.nodes)
        shared = msgspec.structs.replace(self, jobs=jobs, nodes=nodes)
        return hashlib.sha256(msgspec.json.encode(shared)).hexdigest()[:16]

    def save(self, run_dir: str | Path) -> Path:
        path = Path(run_dir) / WORLD_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.format(msgspec.json.encode(self), indent=2), mode=0o600)
        return path

    @classmethod
    def load(cls, run_dir: str | Path) -> "WorldMap":
        path = Path(run_dir) / WORLD_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            raise WorldError(f"{path} does not exist: the launcher writes it before it starts a role") from None
        except (OSError, ValueError) as error:
            raise WorldError(f"{path} is not a world map: {error}") from error


def is_loopback(hostname: str) -> bool:
    return hostname == "localhost" or hostname == "::1" or hostname.startswith("127.")


def build_world(cfg: Config, env: Mapping[str, str]) -> WorldMap:
    """Read the cluster from the launcher's environment `env`, place every job, choose and check this node's ports."""
    return map_world(cfg, read_cluster(cfg.world, env, dry_run=cfg.dry_run))


def map_world(cfg: Config, cluster: Cluster, *, check: bool = True) -> WorldMap:
    """Place every job of a known cluster. ``check=False`` does not check the ports, for simulated clusters.

    Raises:
        WorldError: the jobs do not fit, a port is in use, or the devices do not support ``weights.backend``.
    """
    existing = existing_servers(cfg)
    placements = tuple(p for p in place(request_from_config(cfg), cluster) if not (existing and p.kind == "actor_llm"))
    listening = [p for p in placements if p.kind in LISTENING_KINDS]
    meeting = [_meeting(p.name) for p in listening if p.server]
    weight_ports = WEIGHT_PORTS_PER_SERVER * sum(p.kind == "actor_llm" for p in placements)
    count = 1 + len(listening) + len(meeting) + weight_ports
    base = _port_base(cfg, cluster, count)
    ports = {name: base + 1 + i for i, name in enumerate([*(p.name for p in listening), *meeting])}
    if cfg.streams.port is not None and "redis_0" in ports:
        ports["redis_0"] = cfg.streams.port
    weight_port = base + 1 + len(listening) + len(meeting)
    trainer_node = next(p.node_rank for p in placements if p.kind == "finetune")
    if check:
        node_of = {name: p.node_rank for p in placements for name in (p.name, _meeting(p.name))}
        local = [(name, port) for name, port in ports.items() if node_of[name] == cluster.rank]
        if trainer_node == cluster.rank:
            local.append(("the trainer's rendezvous", base))
            local.extend(("weight transfer", weight_port + i) for i in range(weight_ports))
        _check_local_ports(cfg, cluster, local)
    world = WorldMap(
        accelerator=cluster.accelerator,
        nodes=cluster.nodes,
        jobs=(
            *existing,
            *(
                _with_span(_job(p, cluster, ports.get(p.name), tls=cfg.world.tls), p, placements, cluster, ports)
                for p in placements
            ),
        ),
        master_port=base,
        weight_port=weight_port,
        weight_ports=weight_ports,
        share_devices=cfg.world.share_devices,
        idle_devices=idle_devices(placements, cluster),
    )
    world.transfer_backend(cfg.weights.backend)  # refuses an impossible backend before the start
    return world


def existing_servers(cfg: Config) -> tuple[Job, ...]:
    """The servers of `debug.existing_llms` as jobs, which are not started."""
    urls = cfg.debug.existing_llms
    return tuple(
        Job(
            name=f"actor_llm_{index}",
            kind="actor_llm",
            replica_idx=index,
            hostname=urlsplit(url).hostname or "",
            port=urlsplit(url).port,
            url=url.rstrip("/"),
            serves=index * cfg.world.replicas // len(urls),
        )
        for index, url in enumerate(urls)
    )


def _port_base(cfg: Config, cluster: Cluster, count: int) -> int:
    if cfg.world.port_base is not None:
        last = cfg.world.port_base + count - 1
        if last > LARGEST_PORT:
            raise WorldError(
                f"world.port_base={cfg.world.port_base}: this world needs {count} ports, up to {last}, beyond "
                f"{LARGEST_PORT}: choose at most {LARGEST_PORT - count + 1}, or null"
            )
        return cfg.world.port_base
    if cluster.identity is not None:
        return derive_port_base(cluster.identity, count)
    return find_port_block(LOOPBACK, count)


def _check_local_ports(cfg: Config, cluster: Cluster, ports: list[tuple[str, int]]) -> None:
    host = LOOPBACK if len(cluster.nodes) == 1 and is_loopback(cluster.nodes[0].hostname) else ANY_ADDRESS
    key = f"world.port_base={cfg.world.port_base}"
    if cfg.world.port_base is None and cluster.identity is not None:
        key = f"world.port_base=null (ports derived from world.run_id, here {cluster.identity!r})"
    redis = [(owner, port) for owner, port in ports if owner == "redis_0" and port == cfg.streams.port]
    check_ports(host, redis, key=f"streams.port={cfg.streams.port}")
    check_ports(host, [pair for pair in ports if pair not in redis], key=key)


def url_of(kind: str, hostname: str, port: int | None, *, tls: bool) -> str:
    """The URL of a job. Empty if it does not listen."""
    tls = tls and kind != "environment"  # users' code
    host = f"[{hostname}]" if ":" in hostname else hostname
    scheme = ("rediss" if tls else "redis") if kind == "redis" else ("https" if tls else "http")
    return "" if port is None else f"{scheme}://{host}:{port}"


def _job(placement: Placement, cluster: Cluster, port: int | None, *, tls: bool) -> Job:
    node = cluster.nodes[placement.node_rank]
    served = placement.environment
    return Job(
        name=placement.name,
        kind=placement.kind,
        replica_idx=placement.replica_idx,
        node_rank=placement.node_rank,
        hostname=node.hostname,
        port=port,
        gpus=placement.devices if cluster.accelerator == "cuda" else (),
        cores=placement.cores,
        url=url_of(placement.kind, node.hostname, port, tls=tls),
        num_ranks=max(len(placement.devices), 1),
        first_rank=placement.first_rank,
        serves=placement.serves,
        environment_key=served.key if served else None,
        environment_index=served.index if served else None,
    )


def _meeting(server: str) -> str:
    """Name of the owner of the port where the nodes of this server meet."""
    return f"the nodes of {server}"


def _with_span(
    job: Job, placement: Placement, placements: Sequence[Placement], cluster: Cluster, ports: Mapping[str, int]
) -> Job:
    """The job with its place in a server on several nodes."""
    if not placement.server:
        return job
    nodes = [each for each in placements if each.server == placement.server]
    host = cluster.nodes[nodes[0].node_rank].hostname
    span = Span(nodes=len(nodes), node=placement.server_node, host=host, port=ports[_meeting(placement.server)])
    url = span.address if span.has_workers_only else job.url
    return msgspec.structs.replace(job, span=span, url=url, num_ranks=sum(len(each.devices) for each in nodes))


def check_local_devices(world: WorldMap, node_rank: int, env: Mapping[str, str]) -> None:
    """Refuse jobs on GPUs that this node lacks, although `world.gpus_per_node` names them."""
    needed = 1 + max((gpu for job in world.on_node(node_rank) for gpu in job.gpus), default=-1)
    present = count_visible_gpus(env) if needed else 0
    if present < needed:
        raise WorldError(
            f"node {node_rank} ({world.nodes[node_rank].hostname}) should have {needed} GPU(s) by world.gpus_per_node, "
            f"but NVML and CUDA_VISIBLE_DEVICES show {present}"
        )
