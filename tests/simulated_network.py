"""Servers and their links in simulated time: the project's decisions, over a network that is computed.

Routes, figures of links and judgement are the project's own. The network is a fluid: in every step of `STEP_S` each
flow gets a share of both of its links, equal among those that can use one, and moves whole buckets on. A link between
two servers of a node is the loopback of its source. Any other goes through the uplink of one node and the downlink of
the other. A process may stand still for a while, as on a busy machine: what is sent to it then waits in its socket, and
it sends nothing.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import HELD_UP, OWN_LINK, Address, Link, ParamSpec, WeightUpdateAnswer
from pipelinerl.weights.publish.dispatch import chained, in_order, late
from pipelinerl.weights.publish.links import SLOW, LinkTable, Server
from pipelinerl.weights.publish.servers import ServerClient, UpdateOutcome
from pipelinerl.weights.publish.versions import Dispatch, PendingVersion
from pipelinerl.weights.transfer.puller import AHEAD_BUCKETS, LinkClock
from pipelinerl.weights.transfer.source import IDLE_TELL_S, OLDER_SHARE, TELL_S
from pipelinerl.world import Job

STEP_S, COARSE_STEP_S = 0.01, 0.2
"""The step, and that of the time in which only slow servers are left."""
BUCKET = 1 << 20
SOCKET_BYTES = 4 << 20
"""What is sent to a process that stands still, at most."""
STALL_S = 5.0
TRAINER = Address("trainer", 1)
Rate = Callable[[float], float]
"""Bytes per second at a time within a push."""


@dataclass
class Node:
    """A server, and the network card of its node. The card is that of the node's first server."""

    up: Rate
    down: Rate
    node: str = ""
    """Empty = one of its own."""


@dataclass(frozen=True)
class Stalls:
    """When processes stand still: every ``gap_s`` on average, for ``shortest_s`` … ``longest_s``."""

    seed: int
    gap_s: float = 1.5
    shortest_s: float = 0.1
    longest_s: float = 0.5
    until_s: float = 60.0

    def of(self, process: str, push: int) -> list[bool]:
        """Whether the process stands still in each step of a push."""
        drawn, steps = random.Random(f"{self.seed} {process} {push}"), list[bool]()
        while len(steps) * STEP_S < self.until_s:
            steps += [False] * round(drawn.expovariate(1 / self.gap_s) / STEP_S)
            steps += [True] * round(drawn.uniform(self.shortest_s, self.longest_s) / STEP_S)
        return steps


@dataclass
class Pull:
    """One server's pull of the only part."""

    dispatch: Dispatch
    version: int
    sources: list[Address]
    end: int
    began: float
    """When it began, in seconds of the newest push."""
    clock: LinkClock
    index: int = 0
    upto: int = 0
    links: list[Link] = field(default_factory=list)
    raw: float = 0.0
    """Bytes that came and were not taken yet."""
    told: float = -1.0
    """When the source sent the newest message, in seconds since the beginning, as all that follows."""
    told_end: int = 0
    """The end of its bytes by then."""
    heard: float = 0.0
    """When the newest message or byte came."""
    has_stalled: bool = False
    done_s: float | None = None
    error: str = ""
    """Why it ended without the version."""

    @property
    def server(self) -> str:
        return self.dispatch.client.name

    @property
    def source(self) -> Address:
        return self.sources[self.index]

    @property
    def is_running(self) -> bool:
        return self.done_s is None and not self.error

    def stop(self, now: float) -> None:
        """Ends with this source."""
        if self.done_s is not None:
            self.clock.stop(now)
        if self.clock.upto > self.clock.first or self.clock.ahead_s:
            num_bytes, seconds = self.clock.upto - self.clock.first, now - self.clock.began
            self.links.append(
                Link(
                    source=self.source,
                    transport="tcp",
                    num_bytes=num_bytes,
                    part_bytes=self.end,
                    seconds=seconds,
                    ahead_s=self.clock.ahead_s,
                )
            )

    def leave(self, now: float) -> None:
        """Goes on to the next source."""
        self.stop(now)
        self.index = (self.index + 1) % len(self.sources)
        self.clock = new_clock(self.upto, self.end, now)
        self.raw, self.told, self.heard = 0.0, -1.0, now


def new_clock(upto: int, end: int, now: float) -> LinkClock:
    return LinkClock(upto, upto, end, AHEAD_BUCKETS * BUCKET, began=now, at=now)


@dataclass
class Network:
    """Servers ``0 …`` with one worker each, and their trainer on a node of its own."""

    nodes: list[Node]
    num_bytes: int
    rate: float
    stalls: Stalls | None = None
    loopback: float = 0.0
    """Bytes per second between two servers of a node."""
    timeout_s: float = 1e4
    clients: list[ServerClient] = field(default_factory=list)
    links: LinkTable = field(default_factory=LinkTable)
    pushes: int = 0
    trainer_bytes: int = 0
    """What the trainer sent in the last push."""
    crossings: int = 0
    """Updates that entered a node from another one in the last push, the trainer's left out."""
    lost: list[str] = field(default_factory=list)
    """Servers that left service because their own link was too slow."""
    late: list[str] = field(default_factory=list)
    """Servers that were late in the last push."""
    frozen: set[str] = field(default_factory=set)
    """Servers that neither send nor receive."""

    def __post_init__(self) -> None:
        self._hosts = {TRAINER.host: TRAINER.host}
        self._cards: dict[str, tuple[Rate, Rate]] = {TRAINER.host: (lambda now: self.rate, lambda now: self.rate)}
        for number, node in enumerate(self.nodes):
            name = f"s{number}"
            client = ServerClient(Job(name=name, kind="actor_llm", replica_idx=number), cast(Any, None))
            client.workers, client.is_up = (Address(node.node or name, 1 + number),), True
            self.clients.append(client)
            self._hosts[name] = client.node
        self._names = {client.workers[0]: client.name for client in self.clients}
        self._pulls: dict[str, Pull] = {}
        """The newest one of each server."""
        self._given: dict[int, Counter[Address]] = {}
        """Of each version: bytes that each source has given."""
        self._offers: dict[int, PendingVersion] = {}
        self._stalls: dict[str, list[bool]] = {}
        self._now = 0.0

    def push(
        self, *, longest_s: float = 1e4, awaited: Set[str] | None = None, pause_s: float = 0.0
    ) -> dict[str, float]:
        """Sends a version to all servers. Returns the seconds of each one that has it at the end.

        Args:
            longest_s: the push ends at the latest after so long.
            awaited: the next version comes ``pause_s`` after these servers have this one. None = all have it.
        """
        self._end_push()
        for number, node in enumerate(self.nodes):
            self._cards[self._hosts[f"s{number}"]] = node.up, node.down
        layout = Layout((ParamSpec("w", "uint8", (self.num_bytes,)),))
        self.pushes += 1
        pending = PendingVersion(self.pushes, layout, ((0, self.num_bytes),))
        self._offers[self.pushes], self._given[self.pushes] = pending, Counter()
        for version in list(self._offers):
            if version < self.pushes - 1:
                self._withdraw(version)
        self.links.plan({client.name: client.node for client in self.clients})
        ready = [client for client in self.clients if not self._is_pulling(client)]
        pending.start((client.name for client in ready), self.links.update)
        in_turn = [client for client in in_order(self.clients, self.links.turn) if client in ready]
        dispatches = chained(pending, in_turn, self.links, [TRAINER], BUCKET)
        self.late = sorted({one.name for one in self.clients} - {one.client.name for one in dispatches})
        self.crossings = 0
        for dispatch in dispatches:
            self._start(pending, dispatch)
        names = [TRAINER.host, *(client.name for client in self.clients)]
        self._stalls = {} if self.stalls is None else {name: self.stalls.of(name, self.pushes) for name in names}
        self._run(pending, {client.name for client in self.clients} if awaited is None else awaited, pause_s, longest_s)
        self.trainer_bytes = self._given[self.pushes][TRAINER]
        pulls = [pull for pull in self._pulls.values() if pull.version == self.pushes]
        return {pull.server: pull.began + pull.done_s for pull in pulls if pull.done_s is not None}

    def _end_push(self) -> None:
        """Counts the time of pulls under way from the beginning of the next push on."""
        for pull in self._pulls.values():
            pull.began -= self._now
        self._now = 0.0

    def _is_pulling(self, client: ServerClient) -> bool:
        return client.name in self._pulls and self._pulls[client.name].is_running

    def _withdraw(self, version: int) -> None:
        """The trainer has no memory for a version any more. Its pulls end when they ask for more."""
        offer = self._offers.pop(version)
        for pull in self._pulls.values():
            if pull.version == version and pull.is_running:
                self._fail(pull, offer)

    def _fail(self, pull: Pull, offer: PendingVersion) -> None:
        """A pull ends without the version, and says whether its link was the limit."""
        pull.error = OWN_LINK if pull.clock.is_ahead else HELD_UP
        self._end(pull, offer)

    def _start(self, pending: PendingVersion, dispatch: Dispatch) -> None:
        part, name = dispatch.route[0][0], dispatch.client.name
        clock = new_clock(part.start, part.end, 0.0)
        self._pulls[name] = Pull(dispatch, pending.version, list(part.sources), part.end, self._now, clock)
        pending.pulls[name] = dispatch
        source = part.sources[0]
        self.crossings += source != TRAINER and source.host != dispatch.client.node

    def _run(self, pending: PendingVersion, awaited: Set[str], pause_s: float, longest_s: float) -> None:
        """Lets time pass until the awaited servers have the version, and ``pause_s`` longer."""
        step_s, end_s = STEP_S, longest_s
        while self._now < end_s:
            waiting = {client.name for client in self.clients if not self._has(client, pending.version)}
            if not waiting:
                return
            if not waiting & awaited:
                end_s = min(end_s, self._now + pause_s)
                if self._now >= end_s:
                    return
                awaited = frozenset()
            self._now += step_s
            for pull in self._step(step_s):
                self._end(pull, self._offers[pull.version])
            for pull in self._pulls.values():
                if pull.is_running and self._now - pull.began > self.timeout_s:
                    self._fail(pull, self._offers[pull.version])
            self._start_late(pending)
            running = [pull for pull in self._pulls.values() if pull.is_running]
            is_coarse = all(pull.clock.is_ahead for pull in running) and not self.is_overlapping and not self._stalls
            step_s = COARSE_STEP_S if is_coarse and self._now > 20 * STEP_S else STEP_S

    def _start_late(self, pending: PendingVersion) -> None:
        ready = [one for one in self.clients if not self._is_pulling(one) and not self._has(one, pending.version)]
        ready = [client for client in ready if client.name not in self.frozen]
        if ready:
            holders = [one for one in self.clients if self._has(one, pending.version)]
            patience_s = SLOW * self.links.expected_s(self.num_bytes) + STALL_S
            is_overdue = self._now > patience_s
            for dispatch in late(pending, ready, holders, self.links, [TRAINER], BUCKET, is_overdue=is_overdue):
                self._start(pending, dispatch)

    @property
    def is_overlapping(self) -> bool:
        return len({pull.version for pull in self._pulls.values()}) > 1

    def _has(self, client: ServerClient, version: int) -> bool:
        pull = self._pulls.get(client.name)
        return pull is not None and pull.version == version and pull.done_s is not None

    def _step(self, step_s: float) -> list[Pull]:
        """Moves bytes. Returns the pulls that have ended."""
        running = [pull for pull in self._pulls.values() if pull.is_running]
        for pull in running:
            self._leave_dead_source(pull)
        for pull, num_bytes in zip(running, self._shares(running), strict=True):
            pull.raw += num_bytes * step_s
        for pull in running:
            self._arrive(pull)
        return [pull for pull in running if not pull.is_running]

    def _leave_dead_source(self, pull: Pull) -> None:
        """A source that pulls a newer version has this one no more, and one that stands still is left in time."""
        now = self._now - pull.began
        while (source := self._source_pull(pull)) is not None and source.version > pull.version:
            pull.leave(now)
        name = self._names.get(pull.source, TRAINER.host)
        if pull.server not in self.frozen and name in self.frozen and now - pull.heard > STALL_S:
            pull.leave(now)

    def _source_pull(self, pull: Pull) -> Pull | None:
        return self._pulls.get(self._names.get(pull.source, ""))

    def _end(self, pull: Pull, pending: PendingVersion) -> None:
        """The trainer takes the result of a pull, as `delivery.Pushing` does."""
        pull.stop(self._now - pull.began)
        client, dispatch = pull.dispatch.client, pull.dispatch
        pending.end(client.name, is_served=not pull.error)
        owners = {address: Server(name, self._hosts[name]) for address, name in self._names.items()}
        seen, is_chained = [] if client.name in self.frozen else pull.links, dispatch.is_chained
        self.links.record(
            pending.update, Server(client.name, client.node), seen, owners, dispatch.givers, is_chained=is_chained
        )
        answer = None
        if not pull.error:
            answer = WeightUpdateAnswer(version=pull.version, pause_ms=0, swap_ms=0, transfer_ms=1, prepare_ms=0)
        is_own = pull.error == OWN_LINK and (
            dispatch.givers == {TRAINER}
            if is_chained
            else self.links.had_slow_downlink(pending.update, Server(client.name, client.node))
        )
        if is_own or (pull.error and client.name in self.frozen):
            self.lost.append(client.name)
        outcome = UpdateOutcome(
            version=pull.version,
            num_bytes=self.num_bytes,
            seconds=1.0,
            answer=answer,
            error=pull.error,
            is_held_up=bool(pull.error) and not is_own,
        )
        client.record_outcome(outcome)
        client.is_up = True

    def _is_still(self, process: str) -> bool:
        """Whether a process stands still."""
        steps, step = self._stalls.get(process, []), round(self._now / STEP_S)
        return process in self.frozen or (step < len(steps) and steps[step])

    def _end_of(self, pull: Pull) -> int:
        """The end of the bytes that a pull's source has."""
        if pull.source == TRAINER:
            return pull.end
        source = self._source_pull(pull)
        return source.upto if source is not None and source.version == pull.version else 0

    def _shares(self, running: Sequence[Pull]) -> list[float]:
        """Bytes per second of each flow. An uplink is shared equally; what a flow cannot use, the others get.

        Flows of an older version get a tenth of the trainer's uplink while others pull the newest.
        """
        got = [0.0] * len(running)
        by_uplink: dict[str, list[int]] = {}
        entering = Counter[str]()
        for number, pull in enumerate(running):
            source = self._names.get(pull.source, TRAINER.host)
            host, own = self._hosts[source], self._hosts[pull.server]
            if host == own:
                by_uplink.setdefault(f"loopback of {source}", []).append(number)
            else:
                by_uplink.setdefault(host, []).append(number)
                entering[own] += 1
        for uplink, flows in by_uplink.items():
            left = self._cards[uplink][0](self._now) if uplink in self._cards else self.loopback
            newest = [number for number in flows if running[number].version == self.pushes]

            def most(number: int, left: float = left, newest: list[int] = newest, uplink: str = uplink) -> float:
                pull = running[number]
                if self._is_still(self._names.get(pull.source, TRAINER.host)):
                    return 0.0
                there = self._end_of(pull) - pull.upto - pull.raw
                if self._is_still(pull.server):
                    there = min(there, SOCKET_BYTES - pull.raw)
                down = left
                if uplink in self._cards:
                    host = self._hosts[pull.server]
                    down = self._cards[host][1](self._now) / entering[host]
                if uplink == TRAINER.host and newest and number not in newest:
                    down = min(down, left / OLDER_SHARE)
                return min(down, max(there, 0.0) / STEP_S)

            wanted = sorted((most(number), number) for number in flows)
            for count, (rate, number) in enumerate(wanted):
                got[number] = min(rate, left / (len(flows) - count))
                left -= got[number]
        return got

    def _arrive(self, pull: Pull) -> None:
        """Whole buckets are there, and the source says how far it is."""
        now, given = self._now - pull.began, self._given[pull.version]
        if self._is_still(pull.server):
            pull.has_stalled = True
            return
        if pull.has_stalled and now - pull.told >= 2 * TELL_S and pull.told >= 0:
            pull.told += TELL_S  # a message from the beginning of the stall lies before the bytes
            pull.clock.see(pull.told_end, now)
        pull.has_stalled = False
        whole, bucket = False, pull.dispatch.bucket_bytes
        while pull.raw >= min(bucket, pull.end - pull.upto) - 1e-6 and pull.upto < pull.end:
            size = min(bucket, pull.end - pull.upto)
            pull.upto, pull.clock.upto, pull.heard, whole = pull.upto + size, pull.upto + size, now, True
            pull.raw = max(pull.raw - size, 0.0)
            given[pull.source] += size
        if pull.upto == pull.end:
            pull.done_s = now
            return
        source_end = self._end_of(pull)
        is_starved = source_end < min(pull.upto + bucket, pull.end)
        is_due = (whole and now - pull.told >= TELL_S) or (is_starved and now - pull.told >= IDLE_TELL_S)
        if not self._is_still(self._names.get(pull.source, TRAINER.host)) and (pull.told < 0 or is_due):
            pull.told, pull.told_end, pull.heard = now, source_end, now
            pull.clock.see(max(source_end, pull.upto), now)
