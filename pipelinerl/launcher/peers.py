"""What the leases of a run's launchers mean for one of them. Pure.

Every node has a launcher, which holds the lease `launcher_<rank>` of length `launcher.node_timeout_s`. Rank 0 leads,
the others follow one incarnation of its lease.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipelinerl.config.environment import MIN_SECRET_CHARS, SECRET_VARIABLE, secret_mark
from pipelinerl.config.origin import placeless
from pipelinerl.config.sections import LauncherSection
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.losses import Decision, Departure, LeaderLost, LeasesAway, NodeLost, decide
from pipelinerl.launcher.supervisor import Ending
from pipelinerl.membership.lease import LauncherNote, Lease, Observed
from pipelinerl.world import WorldMap

KIND = "launcher"
REASON_CHARS = 4000
"""Longest reason in a lease, which all nodes read twice a second."""

PeerLauncherState = Literal["awaited", "here"] | Departure
FIRST_CAUSES: tuple[Departure, ...] = ("refused", "failed", "lost", "stopped", "done")
"""If several followers end at once, the first of these is the run's ending."""


class PeerLauncher(NamedTuple):
    """A follower's state in the view of its leader."""

    state: PeerLauncherState = "awaited"
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """The launchers of a run, planned before they meet."""

    rank: int
    hosts: tuple[str, ...]
    jobs: tuple[tuple[str, ...], ...]
    """Names of the jobs of each node."""
    digest: str
    """Digest of configuration and world."""
    mark: str
    """`secret_mark` of the run's secret."""
    place: str
    """Where the leases are, for messages."""
    startup_s: float
    """Launchers wait this long for each other."""
    silence_s: float
    """Length of the leases."""
    away_s: float
    """A follower goes on for this long without reading the leases."""

    def name_of(self, rank: int) -> str:
        return f"node {rank} ({self.hosts[rank]})"

    def kinds_on(self, ranks: Iterable[int]) -> set[str]:
        return {name.rpartition("_")[0] for rank in ranks for name in self.jobs[rank]}

    @property
    def followers(self) -> range:
        return range(1, len(self.hosts))


def lease_name(rank: int) -> str:
    return f"{KIND}_{rank}"


LEADER = lease_name(0)


def plan_peers(
    world: WorldMap,
    rank: int,
    container: Mapping[str, Any],
    env: Mapping[str, str],
    limits: LauncherSection,
    place: str,
    *,
    on_redis: bool = False,
) -> PeerPlan:
    """Plan the launchers of this world.

    Args:
        rank: node rank of this launcher.
        container: the configuration. All launchers must have the same one, except for their folders.
        env: environment with the shared secret.
        place: where the leases are, for messages.
        on_redis: whether they are on redis.

    Raises:
        ConfigError: the secret is missing or too short.
    """
    secret = env.get(SECRET_VARIABLE, "")
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"the world has {len(world.nodes)} nodes but {SECRET_VARIABLE} is not set: give all launchers the same "
            f"random string of at least {MIN_SECRET_CHARS} characters, e.g. from `openssl rand -hex 32`"
        )
    settings = placeless(container, Path.cwd())
    document = json.dumps(settings, sort_keys=True, default=str) + world.digest()
    # A frozen redis is found within heartbeat_timeout_s and started again, and roles wait as long for one that the run
    # did not start. Until then nobody can read the leases.
    outage_s = limits.heartbeat_timeout_s if on_redis else 0.0
    return PeerPlan(
        rank=rank,
        hosts=tuple(node.hostname for node in world.nodes),
        jobs=tuple(tuple(job.name for job in world.on_node(node.rank)) for node in world.nodes),
        digest=hashlib.sha256(document.encode()).hexdigest(),
        mark=secret_mark(secret),
        place=place,
        startup_s=limits.startup_timeout_s,
        silence_s=limits.node_timeout_s,
        away_s=limits.node_timeout_s + outage_s,
    )


def refusal_of(peers: PeerPlan, rank: int, note: LauncherNote) -> str | None:
    """Return why this launcher and the one with this note cannot be in one run. None: they can.

    Args:
        rank: the follower of the two, which the message names.
    """
    who = peers.name_of(rank)
    if note.secret_mark != peers.mark:
        return f"{who} was started with another {SECRET_VARIABLE}: is {SECRET_VARIABLE} the same on all nodes?"
    if note.digest != peers.digest:
        return f"{who} was started with another configuration or world: start the same command on all nodes"
    return None


def living_leader(seen: Observed) -> tuple[Lease, LauncherNote] | None:
    """Return the leader's lease and note if it was renewed. A crashed leader's never is."""
    lease = seen.alive().get(LEADER)
    if lease is None or lease.launcher is None or not seen.sightings[LEADER].is_renewed:
        return None
    return lease, lease.launcher


def is_free(seen: Observed, rank: int, follows: str = "") -> bool:
    """Whether no launcher that follows this leader holds a lease of this rank.

    Args:
        follows: incarnation of the leader's lease. Empty for the leader's own rank.

    Raises:
        ConfigError: one has renewed its lease, so it lives.
    """
    held = seen.alive().get(lease_name(rank))
    if held is None or (note := held.launcher) is None or note.follows != follows or note.ending is not None:
        return True
    if seen.sightings[held.name].is_renewed:
        raise ConfigError(f"another launcher with RANK={rank} is running this run: give each node its own RANK")
    return False


def with_vanished(observed: Observed, leases: Mapping[str, Lease]) -> dict[str, Lease]:
    """Return the leases and the last ones of launchers that vanished, which then count as silent.

    Their holders write all leases again to a store that lost its contents.
    """
    known = {name: sighting.lease for name, sighting in observed.sightings.items() if sighting.lease.kind == KIND}
    return {**known, **leases}


def see_followers(
    peers: PeerPlan, leader: str, observed: Observed, before: Mapping[int, PeerLauncher]
) -> dict[int, PeerLauncher]:
    """Return the state of each follower by rank.

    Args:
        leader: incarnation of the leader's lease.
        before: the result of the last look.
    """
    return {rank: _see(peers, leader, observed, rank, before.get(rank, PeerLauncher())) for rank in peers.followers}


def _see(peers: PeerPlan, leader: str, observed: Observed, rank: int, before: PeerLauncher) -> PeerLauncher:
    name = lease_name(rank)
    lease = observed.sightings[name].lease if name in observed.sightings else None
    note = lease.launcher if lease is not None else None
    if note is None or note.follows != leader or note.secret_mark != peers.mark:  # of an earlier launch, or nobody's
        return before
    refusal = refusal_of(peers, rank, note)
    if refusal is not None:
        return PeerLauncher("refused", refusal) if before.state in ("awaited", "refused") else before
    if note.ending is not None:
        return PeerLauncher(note.ending, note.reason)
    if name not in observed.alive():
        return PeerLauncher("lost", silence(peers))
    return PeerLauncher("here")


def silence(peers: PeerPlan) -> str:
    return f"has been silent for {peers.silence_s:g} s (launcher.node_timeout_s)"


def judge_follower(peers: PeerPlan, rank: int, follower: PeerLauncher) -> Decision | None:
    """Decide what follows if this follower has ended or is lost. None: it is awaited or here."""
    if follower.state == "awaited" or follower.state == "here":
        return None
    others = peers.kinds_on(other for other in range(len(peers.hosts)) if other != rank)
    kinds, name = peers.kinds_on([rank]), peers.name_of(rank)
    return decide(NodeLost(name=name, how=follower.state, reason=follower.reason, kinds=kinds, elsewhere=others))


def end_by_followers(peers: PeerPlan, seen: Mapping[int, PeerLauncher], waited_s: float) -> Decision | None:
    """Return how the leader ends because of its followers. None: it goes on.

    Args:
        waited_s: seconds since the leader's first look.
    """
    for state in FIRST_CAUSES:
        for rank in (rank for rank, follower in seen.items() if follower.state == state):
            decision = judge_follower(peers, rank, seen[rank])
            if decision is not None and decision.action == "end":
                return decision
    missing = [peers.hosts[rank] for rank, follower in seen.items() if follower.state == "awaited"]
    if missing and waited_s > peers.startup_s:
        return Decision(
            action="end",
            reason=f"no launcher from {', '.join(missing)} within launcher.startup_timeout_s={peers.startup_s:g} s: "
            f"start the same command there with RANK set; {how_to_meet(peers)}",
        )
    return None


def how_to_meet(peers: PeerPlan) -> str:
    return (
        f"launchers find each other by leases in {peers.place}, so all nodes share the run folder or have "
        "streams=redis and the same output_dir"
    )


def end_by_leader(peers: PeerPlan, leader: str, observed: Observed, away_s: float) -> Decision | None:
    """Return how a follower ends because of its leader. None: it goes on.

    Args:
        leader: incarnation that it follows.
        away_s: seconds without reading the leases.
    """
    name = peers.name_of(0)
    if away_s:
        decision = decide(LeasesAway(leader=name, place=peers.place, away_s=away_s, limit_s=peers.away_s))
        if decision.action == "end":
            return decision
    if LEADER not in observed.sightings:
        return None
    lease = observed.sightings[LEADER].lease
    note = lease.launcher
    if lease.incarnation != leader:
        reason = "was started again: start the same command here again, too"
        return decide(LeaderLost(name=name, reason=reason))
    if note is not None and note.ending is not None:
        return decide(LeaderLost(name=name, how=note.ending, reason=note.reason))
    if LEADER not in observed.alive():
        return decide(LeaderLost(name=name, reason=silence(peers)))
    return None


def status_lines(peers: PeerPlan, before: Mapping[int, PeerLauncher], now: Mapping[int, PeerLauncher]) -> list[str]:
    """Return the leader's lines for the user about changes since the last look."""
    lines = []
    for rank, follower in now.items():
        was, peer = before.get(rank, PeerLauncher()), peers.name_of(rank)
        if follower.state == was.state:
            continue
        if follower.state == "here":
            lines.append(f"{peer} is {'here' if was.state == 'awaited' else 'back'}")
        elif (decision := judge_follower(peers, rank, follower)) and decision.action == "continue":
            jobs = ", ".join(peers.jobs[rank]) or "its roles"
            again = f"the same command there brings {'them' if len(peers.jobs[rank]) > 1 else 'it'} back"
            lines.append(f"warning: {decision.reason}; the run goes on without {jobs}, and {again}")
    return lines


def actors_done(leader: str, leases: Iterable[Lease]) -> list[str]:
    """Return the awaited jobs that have ended on the followers of this leader."""
    notes = [lease.launcher for lease in leases if lease.launcher is not None]
    return [name for note in notes if note.follows == leader for name in note.actors_done]


def ending_fields(ending: Ending) -> dict[str, str]:
    """Return an ending as fields of a `LauncherNote`."""
    text = ending.reason if ending.failure is None else str(ending.failure)
    return {"ending": ending.kind, "reason": text[:REASON_CHARS]}
