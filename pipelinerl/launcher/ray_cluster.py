"""The Ray cluster of a run: the connection, its machines, and the resources of each role.

Without `launcher.ray_address` the launcher starts a cluster of this machine alone, which listens on loopback only and
ends with the launcher.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipelinerl.config.sections import WorldSection
from pipelinerl.errors import ConfigError, WorldError
from pipelinerl.world import Cluster, Job, Node, WorldMap
from pipelinerl.world.cluster import LOOPBACK, count_visible_gpus
from pipelinerl.world.map import url_of

LOCAL_CPUS = 4096
"""CPUs that a cluster of this machine alone offers: no limit, because roles share its cores as with engine `local`."""
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray take 127.0.0.1 for this machine's address and listen there only."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Jobs that Ray places together and that start and end together: the trainer's ranks, or one other role."""

    jobs: tuple[Job, ...]
    bundles: tuple[Mapping[str, float], ...]
    """Resources of each job."""

    @property
    def name(self) -> str:
        return self.jobs[0].name

    @property
    def kind(self) -> str:
        return self.jobs[0].kind


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect this process to a Ray cluster, or start one on this machine while the block runs.

    Raises:
        ConfigError: ray is not installed, there is no such cluster, or it has no authentication.
    """
    if address is None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ.update(token | LOOPBACK_ONLY)  # Ray reads them when it is imported
    try:
        import ray
    except ImportError as error:
        raise ConfigError("launcher.engine=ray needs Ray: pip install 'pipelinerl[ray]'") from error
    quiet: dict[str, Any] = {"logging_level": "warning", "log_to_driver": False}
    if address is None:
        gpus = count_visible_gpus(os.environ)
        ray.init("local", num_cpus=LOCAL_CPUS, num_gpus=gpus, include_dashboard=False, **quiet)
    else:
        try:
            ray.init(address, **quiet)
        except (ConnectionError, ray.exceptions.RayError) as error:
            raise ConfigError(f"`launcher.ray_address` is {address!r}: {str(error).splitlines()[0]}") from error
    try:
        if os.environ.get("RAY_AUTH_MODE") not in ("token", "disabled"):
            raise ConfigError(
                "this Ray cluster lets everybody who reaches it run commands: start its nodes and the launcher with "
                "RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled if only trusted machines reach it"
            )
        yield
    finally:
        ray.shutdown()


def alive_nodes() -> list[dict[str, Any]]:
    """Return Ray's descriptions of the nodes that are alive."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def cluster_of(nodes: Sequence[Mapping[str, Any]], world: WorldSection, identity: str) -> Cluster:
    """Return the machines for which the world is planned. Ray may place a job on another one with the same resources.

    Args:
        nodes: Ray's descriptions.
        identity: unique to this run, for the choice of ports.

    Raises:
        WorldError: there is no GPU, and ``world.accelerator`` is not cpu.
    """
    on_cpu = world.accelerator == "cpu"
    ordered = sorted(nodes, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    devices = [world.cpu_slots if on_cpu else int(node["Resources"].get("GPU", 0)) for node in ordered]
    used = [(node["NodeManagerAddress"], count) for node, count in zip(ordered, devices, strict=True) if count]
    if not used:
        raise WorldError("no node of this Ray cluster has a GPU: use world.accelerator=cpu, or add nodes with GPUs")
    cores = tuple(sorted(os.sched_getaffinity(0))) if on_cpu else ()
    return Cluster(
        accelerator="cpu" if on_cpu else "cuda",
        nodes=tuple(Node(rank=i, hostname=host, devices=count, cores=cores) for i, (host, count) in enumerate(used)),
        identity=None if {host for host, _ in used} == {LOOPBACK} else world.run_id or identity,
    )


def units_of(world: WorldMap) -> list[Unit]:
    """Return what Ray places: the trainer's jobs as one unit first, which needs the most, and every other job.

    Raises:
        WorldError: a server is on several nodes.
    """
    if any(job.span for job in world.jobs):
        raise WorldError("launcher.engine=ray places every server on one node: set world.nodes_per_server=1")
    trainers = world.get("finetune")
    others = [(job,) for job in world.jobs if job.kind != "finetune"]
    return [Unit(jobs=jobs, bundles=tuple(bundle_of(job) for job in jobs)) for jobs in (trainers, *others)]


def bundle_of(job: Job) -> dict[str, float]:
    """Resources of a job: a CPU for each process, and its GPUs."""
    bundle: dict[str, float] = {"CPU": float(max(job.num_ranks, 1))}
    return bundle | ({"GPU": float(len(job.gpus))} if job.gpus else {})


def world_at(world: WorldMap, hosts: Mapping[str, str]) -> WorldMap:
    """Return the world with jobs at the addresses where Ray has put them. Their GPUs are numbered from 0.

    Args:
        hosts: address of the node, by name of the job.
    """
    ranks = {node.hostname: node.rank for node in reversed(world.nodes)}

    def move(job: Job) -> Job:
        host = hosts.get(job.name)
        if host is None:
            return job
        node_rank = job.node_rank if world.nodes[job.node_rank].hostname == host else ranks.get(host, job.node_rank)
        tls = job.url.startswith(("https:", "rediss:"))
        gpus, url = tuple(range(len(job.gpus))), url_of(job.kind, host, job.port, tls=tls)
        return msgspec.structs.replace(job, hostname=host, node_rank=node_rank, gpus=gpus, url=url)

    return msgspec.structs.replace(world, jobs=tuple(move(job) for job in world.jobs))
