"""The job of a role that the launcher did not place, or that runs at another place than planned."""

import itertools
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pipelinerl.config.sections import Config
from pipelinerl.config.servers import devices_per_node, devices_per_server
from pipelinerl.errors import ConfigError, WorldError
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import LeaseStore
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.cluster import LOOPBACK
from pipelinerl.world.map import Span, url_of
from pipelinerl.world.network import find_port_block
from pipelinerl.world.placement import PARTS

JOINING = ("actor_llm", "preprocessor_llm", "verifier", *PARTS.values())
"""Kinds that may join a run. Actors and preprocessors divide their work among exactly `world.replicas`, and trainer
ranks must all start together."""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """The place of a role that starts alone. None = as the world or this machine has it."""

    hostname: str | None = None
    port: int | None = None
    serves: int | None = None
    cores: tuple[int, ...] = ()
    span: Span | None = None
    """Servers on several nodes: the part that runs here."""


def job_of(name: str, world: WorldMap, cfg: Config, place: Whereabouts, reach: str) -> Job:
    """Return the job of this name.

    Args:
        name: a job of the world, or a kind that may join with its own number.
        place: overrides host, port and replica.
        reach: this machine's address for other roles, if ``place`` has none.

    Raises:
        ConfigError: the server's devices cannot be divided by its nodes.
        WorldError: there is no such job, and its kind cannot join.
    """
    if place.span is not None:
        devices_per_node(cfg, place.span.nodes)
    found = next((job for job in world.jobs if job.name == name), None)
    if found is not None:
        found = msgspec.structs.replace(found, span=place.span or found.span)
        if place.hostname is None and place.port is None:
            return found
        hostname, port = place.hostname or found.hostname, place.port or found.port
        return msgspec.structs.replace(
            found, hostname=hostname, port=port, url=url_of(found.kind, hostname, port, tls=cfg.world.tls)
        )
    kind, number = split_name(name)
    if kind not in JOINING or number is None:
        raise WorldError(
            f"no job {name!r} in this world, and only {', '.join(JOINING)} may join a run; its jobs are "
            f"{[job.name for job in world.jobs]}"
        )
    hostname = place.hostname or reach
    only_workers = place.span is not None and place.span.has_workers_only
    port = None if only_workers else place.port or find_port_block(LOOPBACK if hostname == LOOPBACK else "0.0.0.0", 1)
    url = url_of(kind, hostname, port, tls=cfg.world.tls)
    if place.span is not None and only_workers:
        url = place.span.address
    replicas = cfg.world.replicas
    return Job(
        name=name,
        kind=kind,
        replica_idx=number,
        hostname=hostname,
        port=port,
        url=url,
        cores=place.cores if world.accelerator == "cpu" else (),
        num_ranks=devices_per_server(cfg) if "_llm" in kind else 1,
        serves=number % replicas if place.serves is None else place.serves,
        span=place.span,
    )


def read_span(nodes: int, node: int, meet: str | None) -> Span | None:
    """Return the part of a server on several nodes. None: the role is on one.

    Raises:
        ConfigError: the address is missing, or there is no such node.
    """
    if nodes == 1 and node == 0 and meet is None:
        return None
    host, _, port = (meet or "").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--meet {meet}: a server on several nodes needs HOST:PORT, its node 0 and a free port there")
    if nodes < 2 or not 0 <= node < nodes:
        raise ConfigError(f"--node {node} of --nodes {nodes}: give at least 2 nodes, and one of 0 … nodes - 1")
    return Span(nodes=nodes, node=node, host=host, port=int(port))


def split_name(name: str) -> tuple[str, int | None]:
    """Split `actor_llm_3` into (`actor_llm`, 3) and `actor_llm` into (`actor_llm`, None)."""
    match = re.fullmatch(r"(.+)_(\d+)", name)
    return (match.group(1), int(match.group(2))) if match else (name, None)


def claim_name(kind: str, world: WorldMap, store: LeaseStore, incarnation: str, ttl_s: float) -> str:
    """Claim a free name of this kind by writing a lease with this incarnation, and return the name.

    Raises:
        StoreAwayError: the store does not answer.
    """
    first = 1 + max((job.replica_idx for job in world.get(kind)), default=-1)
    taken = store.leases()
    free = (name for number in itertools.count(first) if (name := f"{kind}_{number}") not in taken)
    return next(name for name in free if store.claim(Lease(name=name, incarnation=incarnation, ttl_s=ttl_s)))


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the network to the peer."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as outward:
        outward.connect(address)
        return str(outward.getsockname()[0])


def reach_of(world: WorldMap, peers: Sequence[tuple[str, int]]) -> str:
    """Return this machine's address for other roles.

    It is loopback if the run stays on this machine, else the address towards the first (host, port) of `peers`, else
    the host name.
    """
    if world.bind_host == LOOPBACK:
        return LOOPBACK
    return address_towards(*peers[0]) if peers else socket.gethostname()
