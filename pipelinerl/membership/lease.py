"""The lease of a role, and what an observer may conclude from the leases that it has seen. Pure.

Clocks of machines are never compared. A lease carries a number that rises with each renewal. An observer counts, on
its own clock, how long the number has stood still. A look that is late counts for at most `MAX_STEP_S`: while the store
is away or the observer is frozen, nobody's lease runs out.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from pipelinerl.world import Job

PROTOCOL = 1
"""Of what roles say to each other over HTTP. A role with another number is not used."""
MAX_STEP_S = 2.0
FORGET_AFTER = 10
"""A lease that has stood still for so many times its length is deleted."""

Name = Annotated[str, Meta(pattern=r"^[a-z]+(_[a-z]+)*_[0-9]+$", max_length=64)]
State = Literal["starting", "ready", "draining"]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One role's lease, as it stands in the store."""

    name: Name
    """The job's name, e.g. `actor_llm_3`."""
    incarnation: str
    """Random, of one process: a role that starts again has another."""
    sequence: Annotated[int, Meta(ge=0)] = 0
    """Rises with each renewal."""
    ttl_s: Annotated[float, Meta(gt=0, le=86_400)]
    """The lease has run out once the sequence has stood still for so many seconds."""
    state: State = "starting"
    """Draining: no new request; what is under way ends."""
    url: str = ""
    serves: Annotated[int, Meta(ge=0)] = 0
    """Servers: the replica of the actor (preprocessor) that uses it."""
    num_ranks: Annotated[int, Meta(ge=1)] = 1
    capacity: Annotated[int, Meta(ge=0)] = 0
    """Servers: rollouts at once."""
    version: str = ""
    """Servers: the weights that it says it holds. For people: the trainer's messages decide."""
    protocol: int = PROTOCOL

    @property
    def kind(self) -> str:
        return self.name.rpartition("_")[0]

    def as_job(self) -> Job:
        """The lease as the world would describe it."""
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
    """A server that may be asked, as far as its lease says."""

    job: Job
    is_draining: bool = False
    """It takes no new request."""


class Sighting(msgspec.Struct, frozen=True):
    """A lease and the observer's time at which it last changed."""

    lease: Lease
    changed_s: float


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """All that one observer knows."""

    clock_s: float = 0.0
    """The observer's own time: the sum of its steps."""
    looked_at: float | None = None
    """`time.monotonic` of the last look."""
    sightings: dict[str, Sighting] = {}
    """The leases that are in the store."""
    known: frozenset[str] = frozenset()
    """Names that were ever seen."""

    def silent_s(self, name: str) -> float:
        """Seconds for which the lease has stood still."""
        return self.clock_s - self.sightings[name].changed_s

    def alive(self) -> dict[str, Lease]:
        """Members whose lease holds."""
        return {
            name: sighting.lease
            for name, sighting in self.sightings.items()
            if self.silent_s(name) < sighting.lease.ttl_s
        }

    def forgotten(self) -> list[Lease]:
        """Members whose lease ran out so long ago that it may be deleted."""
        return [
            sighting.lease
            for name, sighting in self.sightings.items()
            if self.silent_s(name) >= FORGET_AFTER * sighting.lease.ttl_s
        ]


def observe(before: Observed, leases: Mapping[str, Lease], now: float) -> Observed:
    """What the observer knows after a look at the store.

    A lease that was not there at the last look counts as renewed: a new observer gives every lease its whole length.

    Args:
        now: `time.monotonic` of the look.
    """
    step_s = 0.0 if before.looked_at is None else min(max(now - before.looked_at, 0.0), MAX_STEP_S)
    clock_s = before.clock_s + step_s
    sightings: dict[str, Sighting] = {}
    for name, lease in leases.items():
        last = before.sightings.get(name)
        stands_still = last is not None and _renewal(last.lease) == _renewal(lease)
        sightings[name] = Sighting(lease, last.changed_s if last is not None and stands_still else clock_s)
    return Observed(clock_s=clock_s, looked_at=now, sightings=sightings, known=before.known | sightings.keys())


def _renewal(lease: Lease) -> tuple[str, int]:
    return lease.incarnation, lease.sequence


def servers_now(initial: Iterable[Job], observed: Observed, kind: str) -> dict[str, LiveServer]:
    """The run's servers of one kind, by name: where each is now.

    A server of the initial world counts until its first lease was seen, because servers take minutes to start.
    Afterwards its lease decides. Any other server counts while its lease holds and it is ready.

    Args:
        initial: the jobs that the launcher placed.
    """
    servers = {job.name: LiveServer(job) for job in initial if job.kind == kind and job.name not in observed.known}
    for name, lease in observed.alive().items():
        if lease.kind == kind and lease.state != "starting" and lease.url and lease.protocol == PROTOCOL:
            servers[name] = LiveServer(lease.as_job(), is_draining=lease.state == "draining")
    return servers
