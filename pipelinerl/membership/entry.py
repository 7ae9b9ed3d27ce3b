"""The entry of a role into a run: from its command line to its job, its lease, and the others' leases."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.config.load import load_run
from pipelinerl.config.sections import Config, LauncherSection
from pipelinerl.config.servers import first_capacity
from pipelinerl.errors import ConfigError, DeadlineError
from pipelinerl.membership.address import POLL_S, address_of, fetch_run, open_store, parse_address, refused_by
from pipelinerl.membership.joining import JOINING, Whereabouts, claim_name, job_of, reach_of, split_name
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.registration import Registration, new_incarnation
from pipelinerl.membership.stores import LeaseStore, StoreAwayError, StoreRefusedError
from pipelinerl.membership.watch import MembershipWatch
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.placement import PARTS, SERVER_KINDS
from pipelinerl.world.process import own_rank
from pipelinerl.world.proxies import bypass
from pipelinerl.world.tls import adopt

log = logging.getLogger(__name__)

WITHOUT_LEASE = ("redis",)
"""Kinds that other roles find through the run's address."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A role's run, job and store of leases."""

    run_dir: Path
    cfg: Config
    world: WorldMap
    job: Job
    store: LeaseStore
    incarnation: str
    is_claimed: bool
    """Whether the role chose its name by writing its lease."""


@dataclass(frozen=True)
class Membership:
    """A role's own lease, and its view of the others'."""

    watch: MembershipWatch
    registration: Registration | None
    """None for redis and for ranks above 0 of the trainer."""

    def announce(self, **changes: object) -> None:
        """Change fields of the role's own lease."""
        if self.registration is not None:
            self.registration.update(**changes)

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether this role should finish its work and leave the run."""
        return self.registration is not None and self.registration.is_asked_to_leave

    def close(self) -> None:
        if self.registration is not None:
            self.registration.close()
        self.watch.close()


def enter(run: str | None, run_dir: Path | None, name: str, place: Whereabouts) -> Entry:
    """Find a role's run and job from its command line. Waits for a run that is not published yet.

    Args:
        run: the run's address. None = the folder ``run_dir``.
        run_dir: the role's own folder, if the address is on redis.
        name: a job of the world, or a kind that may join, which gets a free number if it has none.

    Raises:
        ConfigError: there is no address, or the folder belongs to another run.
        DeadlineError: the run was not published, or no name could be claimed in time.
        WorldError: there is no such job, and its kind cannot join.
    """
    address = parse_address(run) if run is not None else run_dir
    if address is None:
        raise ConfigError("--run is missing: give the run's folder, or redis://HOST:PORT/RUN")
    folder = address if isinstance(address, Path) else fetch_run(address, run_dir or Path(address.run_id))
    cfg, world = load_run(folder), WorldMap.load(folder)
    adopt(cfg.world, os.environ)
    bypass(os.environ, world.hosts)
    leases = address_of(cfg, folder)
    store, incarnation = open_store(leases), new_incarnation()
    if place.span is not None and place.span.has_workers_only:
        name = part_name(name)
    is_claimed = name in JOINING
    if is_claimed:
        name = _claim(name, world, store, incarnation, cfg.launcher)
    peers = [] if isinstance(leases, Path) else [(leases.host, leases.port)]
    reach = reach_of(world, peers) if split_name(name)[0] in JOINING else ""
    job = job_of(name, world, cfg, place, reach)
    return Entry(
        run_dir=folder, cfg=cfg, world=world, job=job, store=store, incarnation=incarnation, is_claimed=is_claimed
    )


def part_name(name: str) -> str:
    """Return the kind of a part of this server. Raises ``ConfigError`` if it is no server."""
    kind, _ = split_name(name)
    if kind not in PARTS:
        raise ConfigError(f"--job {name} cannot be on several nodes: only {' and '.join(PARTS)} can")
    return PARTS[kind]


def _claim(kind: str, world: WorldMap, store: LeaseStore, incarnation: str, limits: LauncherSection) -> str:
    deadline = time.monotonic() + limits.startup_timeout_s
    while True:
        try:
            return claim_name(kind, world, store, incarnation, limits.lease_ttl_s)
        except StoreRefusedError as error:
            raise refused_by(error) from error
        except StoreAwayError as error:
            if time.monotonic() > deadline:
                limit = f"launcher.startup_timeout_s={limits.startup_timeout_s:g} s"
                raise DeadlineError(f"no name for a new {kind} within {limit}: {error}") from error
            time.sleep(POLL_S)


def take_part(entry: Entry, life: Callable[[], float], on_taken: Callable[[], None]) -> Membership:
    """Begin to renew the role's lease and to watch the others'. The arguments are ``Registration``'s."""
    registration = None
    if entry.job.kind not in WITHOUT_LEASE and own_rank(entry.job.name) == 0:
        registration = Registration(
            entry.store, first_lease(entry), life=life, on_taken=on_taken, is_claimed=entry.is_claimed
        )
    return Membership(MembershipWatch(entry.store, entry.world.jobs), registration)


def first_lease(entry: Entry) -> Lease:
    """Return the first lease of a role: `starting` for servers and their parts, else `ready`."""
    job, is_server = entry.job, entry.job.kind in SERVER_KINDS
    return Lease(
        name=job.name,
        incarnation=entry.incarnation,
        ttl_s=entry.cfg.launcher.lease_ttl_s,
        state="starting" if is_server or job.kind in PARTS.values() else "ready",
        url=job.url,
        serves=job.serves,
        num_ranks=job.num_ranks,
        capacity=first_capacity(entry.cfg) if is_server else 0,
    )
