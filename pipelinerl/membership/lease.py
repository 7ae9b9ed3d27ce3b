"""The lease of a role, and the conclusions of an observer of leases. Pure.

Clocks of different machines are never compared: an observer measures with its own for how long a lease's number has not
changed.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from pipelinerl.world import Job

PROTOCOL = 2
"""Version of the HTTP protocol between roles. A role with another version is not used."""
MAX_STEP_S = 2.0
"""Largest silence that counts between two looks, so that no lease runs out while the store is away or the observer is
frozen. Four looks may be late on a loaded machine."""
FORGET_AFTER = 10
"""A lease is deleted after this many times its length without a renewal. Until then `status` shows its role as gone."""

Name = Annotated[str, Meta(pattern=r"^[a-z]+(_[a-z]+)*_[0-9]+$", max_length=64)]
State = Literal["starting", "ready", "draining"]
EndKind = Literal["done", "stopped", "failed"]


class LauncherNote(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher's message to the launchers of the other nodes, in its lease."""

    digest: str
    """Digest of configuration and world, which must be the same on all nodes."""
    secret_mark: str
    """`config.environment.secret_mark` of the run's secret."""
    follows: str = ""
    """Incarnation of the leader's lease that this launcher follows. Empty for the leader itself."""
    resumed: bool = False
    """Leader: whether the run goes on from an earlier launch."""
    old_streams: bool = False
    """Leader: whether an external redis has records of an earlier launch, so that actors and trainers need theirs."""
    marker: str = ""
    """Leader: name of a file in the run folder, which a node sees if it shares the folder."""
    actors_done: tuple[str, ...] = ()
    """Awaited jobs of this node that have ended."""
    ending: EndKind | None = None
    """How this launcher ends. None = its node takes part in the run."""
    reason: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One role's lease, as it is stored."""

    name: Name
    """The job's name, e.g. `actor_llm_3`."""
    incarnation: str
    """Random identity of one process."""
    sequence: Annotated[int, Meta(ge=0)] = 0
    """Rises with each renewal."""
    ttl_s: Annotated[float, Meta(gt=0)]
    """The lease has run out once the sequence has not changed for this many seconds."""
    state: State = "starting"
    """A draining server takes no new requests and finishes those in progress."""
    url: str = ""
    serves: Annotated[int, Meta(ge=0)] = 0
    """Servers: the replica of the actor (preprocessor) that uses it."""
    num_ranks: Annotated[int, Meta(ge=1)] = 1
    capacity: Annotated[int, Meta(ge=0)] = 0
    """Servers: number of rollouts at the same time."""
    version: str = ""
    """Servers: the weight version that the server reports, only for display: the trainer's messages decide."""
    fetched: tuple[str, str] = ("", "")
    """Servers with `weights.backend=store`: `WeightInfo.serving` and `WeightInfo.reading`, for the trainer."""
    protocol: int = PROTOCOL
    launcher: LauncherNote | None = None
    """Launchers of a world with several nodes."""

    @property
    def kind(self) -> str:
        return self.name.rpartition("_")[0]

    def as_job(self) -> Job:
        """Return the lease as a job of the world."""
        return Job(
            name=self.name,
            kind=self.kind,
            replica_idx=int(self.name.rpartition("_")[2]),
            hostname=urlsplit(self.url).hostname or "",
            url=self.url,
            num_ranks=self.num_ranks,
            serves=self.serves,
        )


class LiveServer(NamedTuple):
    """A server that may get requests according to its lease."""

    job: Job
    is_draining: bool = False
    """It takes no new request."""
    capacity: int | None = None
    """Rollouts at a time that it takes, by its lease. None = not in its lease."""


class Sighting(msgspec.Struct, frozen=True):
    """A lease, and the observer's time of its last change."""

    lease: Lease
    changed_s: float
    is_renewed: bool = False
    """Whether a renewal was seen, so that a crashed process did not leave it."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One observer's knowledge about the leases."""

    clock_s: float = 0.0
    """The observer's own clock: the sum of the times between its looks."""
    looked_at: float | None = None
    """`time.monotonic` of the last look."""
    sightings: dict[str, Sighting] = {}
    """The leases in the store at the last look."""
    known: frozenset[str] = frozenset()
    """All names that it ever saw."""

    def silent_s(self, name: str) -> float:
        """Seconds since the lease was last seen to change."""
        return self.clock_s - self.sightings[name].changed_s

    def alive(self) -> dict[str, Lease]:
        """Leases that have not run out, by name."""
        return {
            name: sighting.lease
            for name, sighting in self.sightings.items()
            if self.silent_s(name) < sighting.lease.ttl_s
        }

    def forgotten(self) -> list[Lease]:
        """Leases to delete (`FORGET_AFTER`)."""
        return [
            sighting.lease
            for name, sighting in self.sightings.items()
            if self.silent_s(name) >= FORGET_AFTER * sighting.lease.ttl_s
        ]


def observe(before: Observed, leases: Mapping[str, Lease], now: float) -> Observed:
    """Return the observer's knowledge after a look at the store.

    A lease that was not there at the last look gets its whole length.

    Args:
        leases: the leases in the store, by name.
        now: `time.monotonic` of the look.
    """
    step_s = 0.0 if before.looked_at is None else min(max(now - before.looked_at, 0.0), MAX_STEP_S)
    clock_s = before.clock_s + step_s
    sightings: dict[str, Sighting] = {}
    for name, lease in leases.items():
        last = before.sightings.get(name)
        if last is None or last.lease.incarnation != lease.incarnation:
            sightings[name] = Sighting(lease, clock_s)
        elif last.lease.sequence != lease.sequence:
            sightings[name] = Sighting(lease, clock_s, is_renewed=True)
        else:
            sightings[name] = Sighting(lease, last.changed_s, last.is_renewed)
    return Observed(clock_s=clock_s, looked_at=now, sightings=sightings, known=before.known | sightings.keys())


def count_parts(observed: Observed, address: str) -> int:
    """Return the number of a server's nodes that are ready besides its first. ``address``: ``Span.address``."""
    leases = observed.alive().values()
    return sum(lease.url == address and lease.kind.endswith("_part") and lease.state == "ready" for lease in leases)


def servers_now(initial: Iterable[Job], observed: Observed, kind: str) -> dict[str, LiveServer]:
    """Return the run's servers of one kind and their present addresses, by name.

    A server counts while its lease is held and its state is not `starting`.

    Args:
        initial: servers that the launcher placed count until their first lease, since they take minutes to start.
    """
    servers = {job.name: LiveServer(job) for job in initial if job.kind == kind and job.name not in observed.known}
    for name, lease in observed.alive().items():
        if lease.kind == kind and lease.state != "starting" and lease.url and lease.protocol == PROTOCOL:
            servers[name] = LiveServer(lease.as_job(), lease.state == "draining", lease.capacity or None)
    return servers
