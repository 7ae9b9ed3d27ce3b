"""The job of a role that the launcher did not place, or that runs elsewhere than it was placed."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pipelinerl.config.sections import Config
from pipelinerl.config.servers import devices_per_server
from pipelinerl.errors import WorldError
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import LeaseStore
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.cluster import LOOPBACK
from pipelinerl.world.ports import find_port_block

JOINING = ("actor_llm", "preprocessor_llm", "verifier")
"""Kinds of which more may come than the launcher placed. Actors and preprocessors divide the problems and the optimizer
steps among exactly `world.replicas`, trainer ranks are one gang."""
SCHEMES = {"redis": "redis"}
MAX_TRIES = 1000


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where a role runs that starts alone; None = decide from what is here."""

    hostname: str | None = None
    port: int | None = None
    serves: int | None = None
    cores: tuple[int, ...] = ()


def job_of(name: str, world: WorldMap, cfg: Config, place: Whereabouts, reach: str) -> Job:
    """The job to run under this name.

    Args:
        name: a job of the world, or a joining kind with a number of its own.
        reach: this machine's address as others of the run reach it, where ``place`` names none.

    Raises:
        WorldError: no such job, and its kind cannot join.
    """
    found = next((job for job in world.jobs if job.name == name), None)
    if found is not None:
        if place.hostname is None and place.port is None:
            return found
        hostname, port = place.hostname or found.hostname, place.port or found.port
        return msgspec.structs.replace(found, hostname=hostname, port=port, url=url_of(found.kind, hostname, port))
    kind, number = split_name(name)
    if kind not in JOINING or number is None:
        raise WorldError(
            f"no job {name!r} in this world, and only {', '.join(JOINING)} may join a run; its jobs are "
            f"{[job.name for job in world.jobs]}"
        )
    hostname = place.hostname or reach
    port = place.port or find_port_block(LOOPBACK if hostname == LOOPBACK else "0.0.0.0", 1)
    replicas = cfg.world.replicas
    return Job(
        name=name,
        kind=kind,
        replica_idx=number,
        hostname=hostname,
        port=port,
        url=url_of(kind, hostname, port),
        cores=place.cores if world.accelerator == "cpu" else (),
        num_ranks=devices_per_server(cfg) if kind.endswith("_llm") else 1,
        serves=number % replicas if place.serves is None else place.serves,
    )


def split_name(name: str) -> tuple[str, int | None]:
    """`actor_llm_3` → (`actor_llm`, 3); `actor_llm` → (`actor_llm`, None)."""
    match = re.fullmatch(r"(.+)_(\d+)", name)
    return (match.group(1), int(match.group(2))) if match else (name, None)


def url_of(kind: str, hostname: str, port: int | None) -> str:
    host = f"[{hostname}]" if ":" in hostname else hostname
    return "" if port is None else f"{SCHEMES.get(kind, 'http')}://{host}:{port}"


def claim_name(kind: str, world: WorldMap, store: LeaseStore, incarnation: str, ttl_s: float) -> str:
    """A name of this kind that nobody has, claimed in the store under this incarnation."""
    first = 1 + max((job.replica_idx for job in world.get(kind)), default=-1)
    taken = store.leases()
    for number in range(first, first + MAX_TRIES):
        name = f"{kind}_{number}"
        lease = Lease(name=name, incarnation=incarnation, ttl_s=ttl_s)
        if name not in taken and store.claim(lease):
            return name
    raise WorldError(f"{MAX_TRIES} names of {kind} are taken: remove old leases")


def address_towards(host: str, port: int) -> str:
    """This machine's address as the peer sees it."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def reach_of(world: WorldMap, peers: Sequence[tuple[str, int]]) -> str:
    """How others reach this machine: by loopback, in a run that stays on it, else by its address towards a peer."""
    if world.bind_host == LOOPBACK:
        return LOOPBACK
    return address_towards(*peers[0]) if peers else socket.gethostname()
