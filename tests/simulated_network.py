"""Servers and their links in simulated time: the project's decisions, over a network that is computed.

Routes, choice of sources and judgement are the project's own. The network is a fluid: in every step of `STEP_S` each
flow gets a share of both of its links, equal among those that can use one, and moves whole buckets on. A process may
stand still for a while, as on a busy machine: what is sent to it then waits in its socket, and it sends nothing.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import HELD_UP, OWN_LINK, Address, Link, ParamSpec, WeightUpdateAnswer
from pipelinerl.weights.publish.dispatch import chained, expected_s, joining
from pipelinerl.weights.publish.server_client import ServerClient, UpdateOutcome
from pipelinerl.weights.publish.standing import Report, UsualRate, healthy_s, judge_links
from pipelinerl.weights.publish.versions import Dispatch, PendingVersion
from pipelinerl.weights.transfer.buffers import Range
from pipelinerl.weights.transfer.source import IDLE_TELL_S, OLDER_SHARE, TELL_S
from pipelinerl.weights.transfer.source_choice import Sight, SourceChoice
from pipelinerl.world import Job

STEP_S, COARSE_STEP_S = 0.01, 0.2
"""The step, and that of the time in which only slow servers are left."""
BUCKET = 1 << 20
SOCKET_BYTES = 4 << 20
"""What is sent to a process that stands still, at most."""
TRAINER = Address("trainer", 1)


@dataclass
class Node:
    """A server or the trainer. Rates are bytes per second at a time within a push."""

    up: Callable[[float], float]
    down: Callable[[float], float]


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
    """One server's pull of one part."""

    dispatch: Dispatch
    version: int
    sources: list[Address]
    part: Range
    choice: SourceChoice
    began: float
    """When it began, in seconds of the newest push."""
    raw: float = 0.0
    """Bytes that came and were not taken yet."""
    told: float = -1.0
    """When the source sent the newest message, in seconds since the beginning, as all that follows."""
    told_end: int = 0
    """The end of its bytes by then."""
    has_stalled: bool = False
    done_s: float | None = None
    error: str = ""
    """Why it ended without the version."""

    @property
    def server(self) -> str:
        return self.dispatch.client.name

    @property
    def source(self) -> Address:
        return self.sources[self.choice.index]

    @property
    def is_running(self) -> bool:
        return self.done_s is None and not self.error


@dataclass
class Network:
    """Servers ``0 …`` with one worker each, and their trainer."""

    nodes: list[Node]
    num_bytes: int
    rate: float
    stalls: Stalls | None = None
    clients: list[ServerClient] = field(default_factory=list)
    pushes: int = 0
    left: list[str] = field(default_factory=list)
    """Why sources were left, in all pushes."""
    trainer_bytes: int = 0
    """What the trainer sent in the last push."""
    failures: list[str] = field(default_factory=list)
    """Servers whose own link was too slow for a version."""

    def __post_init__(self) -> None:
        for number in range(len(self.nodes)):
            job = Job(name=f"s{number}", kind="actor_llm", replica_idx=number)
            client = ServerClient(job, cast(Any, None))
            client.workers, client.is_up = (Address(client.name, 1),), True
            self.clients.append(client)
        self._by_name = dict(zip((client.name for client in self.clients), self.nodes, strict=True))
        self._pulls: dict[str, Pull] = {}
        """The newest one of each server."""
        self._given: dict[int, Counter[Address]] = {}
        """Of each version: bytes that each source has given."""
        self._offers: dict[int, PendingVersion] = {}
        self._stalls: dict[str, list[bool]] = {}
        self._now, self._usual = 0.0, UsualRate()

    def push(
        self, *, longest_s: float = 1e4, awaited: Set[str] | None = None, pause_s: float = 0.0
    ) -> dict[str, float]:
        """Sends a version to all servers. Returns the seconds of each one that has it at the end.

        Args:
            longest_s: the push ends at the latest after so long.
            awaited: the next version comes ``pause_s`` after these servers have this one. None = all have it.
        """
        self._end_push()
        layout = Layout((ParamSpec("w", "uint8", (self.num_bytes,)),))
        self.pushes += 1
        pending = PendingVersion(self.pushes, layout, ((0, self.num_bytes),))
        self._offers[self.pushes], self._given[self.pushes] = pending, Counter()
        for version in list(self._offers):
            if version < self.pushes - 1:
                self._withdraw(version)
        ready = [client for client in self.clients if not self._is_pulling(client)]
        pending.start((client.name for client in ready), {client.name: client.standing for client in self.clients})
        before = [client.last for client in self.clients if client.last is not None]
        for dispatch in chained(pending, ready, [TRAINER], BUCKET):
            self._start(pending, dispatch, before)
        names = [TRAINER.host, *(client.name for client in ready)]
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
        del self._offers[version]
        for pull in self._pulls.values():
            if pull.version == version and pull.is_running:
                pull.error = OWN_LINK if pull.choice.is_own_limit else HELD_UP
                self._end(pull)

    def _start(self, pending: PendingVersion, dispatch: Dispatch, before: Sequence[UpdateOutcome]) -> None:
        part = dispatch.route[0][0]
        choice = SourceChoice(
            len(part.sources),
            start=part.start,
            end=part.end,
            bucket_bytes=dispatch.bucket_bytes,
            expected_s=expected_s(self.num_bytes, before),
            roams=not dispatch.client.standing.is_slow,
        )
        spread = Range(part.start, part.end, part.start, began=1e-9)
        name, sources = dispatch.client.name, list(part.sources)
        self._pulls[name] = Pull(dispatch, pending.version, sources, spread, choice, self._now)
        pending.pulls[name] = dispatch

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
                self._end(pull)
            late = [m for m in self.clients if not self._is_pulling(m) and not self._has(m, pending.version)]
            if late:
                self._join(pending, late)
            running = [pull for pull in self._pulls.values() if pull.is_running]
            if all(pull.choice.is_own_limit for pull in running) and not self.is_overlapping:
                step_s = COARSE_STEP_S

    def _join(self, pending: PendingVersion, late: Sequence[ServerClient]) -> None:
        """Starts the pulls of servers that came after the chain."""
        holders = [one for one in self.clients if self._has(one, pending.version) or one.name in pending.pulls]
        holders = [one for one in holders if not one.is_suspect]
        before = [client.last for client in self.clients if client.last is not None]
        for dispatch in joining(pending, late, holders, [TRAINER], BUCKET):
            self._start(pending, dispatch, before)

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
            self._leave_withdrawn(pull)
        for pull, num_bytes in zip(running, self._shares(running), strict=True):
            pull.raw += num_bytes * step_s
        for pull in running:
            self._arrive(pull)
        return [pull for pull in running if not pull.is_running]

    def _leave_withdrawn(self, pull: Pull) -> None:
        """A source that pulls a newer version has this one no more."""
        while (source := self._pulls.get(pull.source.host)) is not None and source.version > pull.version:
            pull.choice.fail()
            pull.raw, pull.told = 0.0, -1.0

    def _end(self, pull: Pull) -> None:
        """The trainer takes the result of a pull."""
        client, pending = pull.dispatch.client, self._offers.get(pull.version)
        if pending is not None:
            pending.end(client.name, is_served=not pull.error)
        client.is_suspect = bool(pull.error)
        if pull.error == OWN_LINK:
            self.failures.append(client.name)
            client.standing.fail(client.name, pull.version)
        if pull.done_s is None:
            return
        answer = WeightUpdateAnswer(
            version=pull.version, pause_ms=0, swap_ms=0, transfer_ms=1e3 * pull.done_s, prepare_ms=0
        )
        client.last = UpdateOutcome(version=pull.version, num_bytes=self.num_bytes, seconds=pull.done_s, answer=answer)
        if pending is None:
            return
        reports = pending.reports.setdefault(None, [])
        if pull.dispatch.is_chained:
            reports.append(Report(server=pull.server, seconds=pull.done_s, links=links(pull)))
            names = {client.workers[0]: client.name for client in self.clients}
            self._usual.record(pull.version, self.num_bytes, reports)
            verdict = judge_links(reports, names, pending.standings, self._usual.seconds(self.num_bytes))
            for one in self.clients:
                one.standing.judge(one.name, pull.version, verdict)
        if client.standing.gives_slowly and reports:
            uplink = self._by_name[client.name].up(self._now)
            client.standing.gauge(client.name, pull.version, self.num_bytes / uplink, healthy_s(reports))

    def _is_still(self, process: str) -> bool:
        """Whether a process stands still."""
        steps, step = self._stalls.get(process, []), round(self._now / STEP_S)
        return step < len(steps) and steps[step]

    def _end_of(self, pull: Pull) -> int:
        """The end of the bytes that a pull's source has."""
        if pull.source == TRAINER:
            return pull.part.end
        source = self._pulls.get(pull.source.host)
        return source.part.upto if source is not None and source.version == pull.version else 0

    def _shares(self, running: Sequence[Pull]) -> list[float]:
        """Bytes per second of each flow. An uplink is shared equally; what a flow cannot use, the others get.

        Flows of an older version get a tenth of the trainer's uplink while others pull the newest.
        """
        got = [0.0] * len(running)
        by_source: dict[str, list[int]] = {}
        for number, pull in enumerate(running):
            by_source.setdefault(pull.source.host, []).append(number)
        for source, flows in by_source.items():
            left = self.rate if source == TRAINER.host else self._by_name[source].up(self._now)
            if self._is_still(source):
                continue
            newest = [number for number in flows if running[number].version == self.pushes]

            def most(number: int, left: float = left, newest: list[int] = newest, source: str = source) -> float:
                pull = running[number]
                there = self._end_of(pull) - pull.part.upto - pull.raw
                if self._is_still(pull.server):
                    there = min(there, SOCKET_BYTES - pull.raw)
                down = self._by_name[pull.server].down(self._now)
                if source == TRAINER.host and newest and number not in newest:
                    down = min(down, left / OLDER_SHARE)
                return min(down, max(there, 0.0) / STEP_S)

            wanted = sorted((most(number), number) for number in flows)
            for count, (rate, number) in enumerate(wanted):
                got[number] = min(rate, left / (len(flows) - count))
                left -= got[number]
        return got

    def _arrive(self, pull: Pull) -> None:
        """Whole buckets are there, and the source says how far it is."""
        part, now, given = pull.part, self._now - pull.began, self._given[pull.version]
        if self._is_still(pull.server):
            pull.has_stalled = True
            return
        if pull.has_stalled and now - pull.told >= 2 * TELL_S and pull.told >= 0:
            pull.told += TELL_S  # a message from the beginning of the stall lies before the bytes
            self._see(pull, pull.told_end)
        pull.has_stalled = False
        whole, bucket = False, pull.dispatch.bucket_bytes
        while pull.raw >= min(bucket, part.end - part.upto) - 1e-6 and part.upto < part.end:
            size = min(bucket, part.end - part.upto)
            part.upto, part.moved, whole = part.upto + size, now, True
            pull.raw = max(pull.raw - size, 0.0)
            given[pull.source] += size
            pull.choice.took(size)
        if part.upto == part.end:
            pull.done_s = now
            return
        source_end = self._end_of(pull)
        is_starved = source_end < min(part.upto + bucket, part.end)
        is_due = (whole and now - pull.told >= TELL_S) or (is_starved and now - pull.told >= IDLE_TELL_S)
        if pull.told < 0 or (is_due and not self._is_still(pull.source.host)):
            pull.told, pull.told_end = now, source_end
            self._see(pull, source_end)

    def _see(self, pull: Pull, source_end: int) -> None:
        """The puller takes the message that its source sent at ``pull.told``."""
        reason = pull.choice.see(self._sight(pull, source_end))
        pull.part.set_upstream(pull.choice.healthy_rate, is_limited=pull.choice.is_limited)
        if reason:
            self.left.append(f"{pull.server} at {self._now:.2f} s: {reason}")
            pull.raw, pull.told = 0.0, -1.0

    def _sight(self, pull: Pull, source_end: int) -> Sight:
        now, source = self._now - pull.began, self._pulls.get(pull.source.host)
        part = None if source is None else source.part
        best_rate = 0.0
        if source is not None:
            best_rate = max(source.part.mean_rate(self._now - source.began), source.part.upstream_rate)
        running = [one for one in self._pulls.values() if one.version == pull.version and one.is_running]
        return Sight(
            at=now,
            upto=pull.part.upto,
            source_end=max(source_end, pull.part.upto),
            held_s=now - pull.told,
            best_rate=best_rate,
            pullers=sum(other.source == pull.source for other in running),
            given=self._given[pull.version][pull.source],
            source_is_limited=part is not None and part.is_limited,
        )


def links(pull: Pull) -> tuple[Link, ...]:
    seen = zip(pull.sources, pull.choice.shares(pull.part.end), pull.choice.shared, strict=True)
    return tuple(
        Link(source=source, share=share, whole_s=whole_s, is_shared=is_shared)
        for source, (share, whole_s), is_shared in seen
        if share or whole_s
    )
