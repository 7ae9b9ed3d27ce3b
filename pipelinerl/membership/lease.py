"""The lease of a role, and what an observer may conclude from the leases that it has seen. Pure.

Clocks of different machines are never compared. A lease has a number that rises with each renewal. An observer measures
with its own clock for how long the number has not changed. The time between two looks counts as at most `MAX_STEP_S`,
so that no lease runs out while the store is away or the observer is frozen.
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
"""Four looks: no more silence is counted at once than an observer may miss on a loaded machine."""
FORGET_AFTER = 10
"""A lease that was not renewed for this many times its length is deleted. Until then people see who is gone."""

Name = Annotated[str, Meta(pattern=r"^[a-z]+(_[a-z]+)*_[0-9]+$", max_length=64)]
State = Literal["starting", "ready", "draining"]
EndKind = Literal["done", "stopped", "failed"]


class LauncherNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher of a node tells the launchers of the others in its lease."""

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
    """Leader: name of a file in the run folder, by which a node finds out whether it shares the folder."""
    actors_done: tuple[str, ...] = ()
    """Jobs of this node whose end is awaited and that have ended."""
    ending: EndKind | None = None
    """How this launcher ends. None = its node takes part in the run."""
    reason: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One role's lease, as it is stored."""

    name: Name
    """The job's name, e.g. `actor_llm_3`."""
    incarnation: str
    """Random identity of one process. A role that starts again has another."""
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
    """Servers: the weight version that the server reports. It is only displayed: the trainer's messages decide."""
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
    """Rollouts at a time that it takes, by its lease. None = it has not said."""


class Sighting(msgspec.Struct, frozen=True):
    """A lease and the time on the observer's clock at which it last changed."""

    lease: Lease
    changed_s: float
    is_renewed: bool = False
    """Whether its holder was seen to renew it, so that it is not left by a crash."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one observer knows about the leases."""

    clock_s: float = 0.0
    """The observer's own clock: the sum of the times between its looks."""
    looked_at: float | None = None
    """`time.monotonic` of the last look."""
    sightings: dict[str, Sighting] = {}
    """The leases in the store at the last look."""
    known: frozenset[str] = frozenset()
    """All names that were ever seen."""

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
        """Leases that ran out so long ago that they may be deleted."""
        return [
            sighting.lease
            for name, sighting in self.sightings.items()
            if self.silent_s(name) >= FORGET_AFTER * sighting.lease.ttl_s
        ]


def observe(before: Observed, leases: Mapping[str, Lease], now: float) -> Observed:
    """Return what the observer knows after a look at the store.

    A lease that was not there at the last look counts as renewed, so that a new observer gives every lease its whole
    length.

    Args:
        before: what the observer knew before.
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
    """Return how many nodes of a server are ready besides its first. They meet at this address (``Span.address``)."""
    leases = observed.alive().values()
    return sum(lease.url == address and lease.kind.endswith("_part") and lease.state == "ready" for lease in leases)


def servers_now(initial: Iterable[Job], observed: Observed, kind: str) -> dict[str, LiveServer]:
    """Return the run's servers of one kind and their present addresses, by name.

    A server that the launcher placed counts until its first lease is seen, because servers take minutes to start.
    Afterwards, and for any other server, it counts while its lease is held and its state is not `starting`.

    Args:
        initial: the jobs that the launcher placed.
    """
    servers = {job.name: LiveServer(job) for job in initial if job.kind == kind and job.name not in observed.known}
    for name, lease in observed.alive().items():
        if lease.kind == kind and lease.state != "starting" and lease.url and lease.protocol == PROTOCOL:
            servers[name] = LiveServer(lease.as_job(), lease.state == "draining", lease.capacity or None)
    return servers
