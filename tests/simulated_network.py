"""Servers and their links in simulated time: the project's decisions, over a network that is computed.

Routes, choice of sources and judgement are the project's own. The network is a fluid: in every step of `STEP_S` each
flow gets a share of both of its links, equal among those that can use one, and moves whole buckets on. A process may
stand still for a while, as on a busy machine: what is sent to it then waits in its socket, and it sends nothing.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import Address, Link, ParamSpec, WeightUpdateAnswer
from pipelinerl.weights.publish.dispatch import Dispatch, chained, expected_s
from pipelinerl.weights.publish.server_client import ServerClient, UpdateOutcome
from pipelinerl.weights.publish.standing import Report, healthy_s, judge_links
from pipelinerl.weights.publish.versions import PendingVersion
from pipelinerl.weights.transfer.buffers import Range
from pipelinerl.weights.transfer.source import IDLE_TELL_S, TELL_S
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

    server: str
    sources: list[Address]
    part: Range
    choice: SourceChoice
    bucket: int
    raw: float = 0.0
    """Bytes that came and were not taken yet."""
    told: float = -1.0
    """When the source sent the newest message."""
    told_end: int = 0
    """The end of its bytes by then."""
    has_stalled: bool = False
    done_s: float | None = None
    left: list[str] = field(default_factory=list)
    """Why sources were left."""
    given_by: Counter[Address] = field(default_factory=Counter)
    """Of the whole network: bytes that each source has given."""

    @property
    def source(self) -> Address:
        return self.sources[self.choice.index]


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

    def __post_init__(self) -> None:
        for number in range(len(self.nodes)):
            job = Job(name=f"s{number}", kind="actor_llm", replica_idx=number)
            client = ServerClient(job, cast(Any, None))
            client.workers, client.is_up = (Address(client.name, 1),), True
            self.clients.append(client)

    def push(self, *, longest_s: float = 1e4) -> dict[str, float]:
        """Sends a version to all servers. Returns the seconds of each one that has it before ``longest_s``."""
        layout = Layout((ParamSpec("w", "uint8", (self.num_bytes,)),))
        self.pushes += 1
        pending = PendingVersion(self.pushes, layout, ((0, self.num_bytes),))
        before = [client.last for client in self.clients if client.last is not None]
        dispatches = chained(pending, self.clients, [TRAINER], BUCKET)
        pulls = {d.client.name: self._pull(d, expected_s(self.num_bytes, before)) for d in dispatches}
        given = Counter[Address]()
        for pull in pulls.values():
            pull.given_by = given
        stalls = {}
        if self.stalls is not None:
            stalls = {name: self.stalls.of(name, self.pushes) for name in [TRAINER.host, *pulls]}
        nodes = {m.name: node for m, node in zip(self.clients, self.nodes, strict=True)}
        run(pulls, nodes, self.rate, longest_s, stalls)
        self.left += [f"{pull.server} {reason}" for pull in pulls.values() for reason in pull.left]
        self.trainer_bytes = given[TRAINER]
        ended = sorted((pull for pull in pulls.values() if pull.done_s is not None), key=lambda pull: pull.done_s or 0)
        reports, known = list[Report](), {client.name: copy.copy(client.standing) for client in self.clients}
        names = {client.workers[0]: client.name for client in self.clients}
        for pull in ended:
            assert pull.done_s is not None
            reports.append(Report(server=pull.server, seconds=pull.done_s, links=links(pull)))
            verdict = judge_links(reports, names, known)
            for client in self.clients:
                client.standing.judge(client.name, verdict)
        for pull in ended:
            client, node = next((m, n) for m, n in zip(self.clients, self.nodes, strict=True) if m.name == pull.server)
            assert pull.done_s is not None
            answer = WeightUpdateAnswer(
                version=self.pushes, pause_ms=0, swap_ms=0, transfer_ms=1e3 * pull.done_s, prepare_ms=0
            )
            client.last = UpdateOutcome(
                version=self.pushes, num_bytes=self.num_bytes, seconds=pull.done_s, answer=answer
            )
            if client.standing.gives_slowly:
                client.standing.gauge(client.name, self.num_bytes / node.up(pull.done_s), healthy_s(reports))
        return {pull.server: pull.done_s for pull in ended if pull.done_s is not None}

    def _pull(self, dispatch: Dispatch, expected: float) -> Pull:
        part = dispatch.route[0][0]
        choice = SourceChoice(
            len(part.sources),
            start=part.start,
            end=part.end,
            bucket_bytes=dispatch.bucket_bytes,
            expected_s=expected,
            roams=not dispatch.client.standing.is_slow,
        )
        spread = Range(part.start, part.end, part.start, began=1e-9)
        return Pull(dispatch.client.name, list(part.sources), spread, choice, dispatch.bucket_bytes)


def links(pull: Pull) -> tuple[Link, ...]:
    seen = zip(pull.sources, pull.choice.shares(pull.part.end), strict=True)
    return tuple(Link(source=s, share=share, whole_s=whole_s) for s, (share, whole_s) in seen if share or whole_s)


@dataclass
class Moment:
    """A step of the simulation."""

    now: float
    pulls: Mapping[str, Pull]
    stalls: Mapping[str, list[bool]]

    def is_still(self, process: str) -> bool:
        """Whether a process stands still."""
        steps, step = self.stalls.get(process, []), round(self.now / STEP_S)
        return step < len(steps) and steps[step]

    def end_of(self, source: Address, end: int) -> int:
        return end if source == TRAINER else self.pulls[source.host].part.upto


def run(
    pulls: Mapping[str, Pull],
    nodes: Mapping[str, Node],
    rate: float,
    longest_s: float,
    stalls: Mapping[str, list[bool]],
) -> None:
    """Lets time pass until everybody has the version."""
    now, step_s = 0.0, STEP_S
    while now < longest_s and any(pull.done_s is None for pull in pulls.values()):
        now += step_s
        moment = Moment(now, pulls, stalls)
        running = [pull for pull in pulls.values() if pull.done_s is None]
        for pull, num_bytes in zip(running, shares(running, nodes, rate, moment), strict=True):
            pull.raw += num_bytes * step_s
        for pull in running:
            arrive(pull, moment)
        if all(pull.choice.is_own_limit for pull in running):
            step_s = COARSE_STEP_S


def shares(running: Sequence[Pull], nodes: Mapping[str, Node], rate: float, moment: Moment) -> list[float]:
    """Bytes per second of each flow. An uplink is shared equally; what a flow cannot use, the others get."""
    got = [0.0] * len(running)
    by_source: dict[str, list[int]] = {}
    for number, pull in enumerate(running):
        by_source.setdefault(pull.source.host, []).append(number)
    for source, flows in by_source.items():
        left = rate if source == TRAINER.host else nodes[source].up(moment.now)
        if moment.is_still(source):
            continue

        def most(number: int) -> float:
            pull = running[number]
            there = moment.end_of(pull.source, pull.part.end) - pull.part.upto - pull.raw
            if moment.is_still(pull.server):
                there = min(there, SOCKET_BYTES - pull.raw)
            return min(nodes[pull.server].down(moment.now), max(there, 0.0) / STEP_S)

        for count, number in enumerate(sorted(flows, key=most)):
            got[number] = min(most(number), left / (len(flows) - count))
            left -= got[number]
    return got


def arrive(pull: Pull, moment: Moment) -> None:
    """Whole buckets are there, and the source says how far it is."""
    part, now = pull.part, moment.now
    if moment.is_still(pull.server):
        pull.has_stalled = True
        return
    if pull.has_stalled and now - pull.told >= 2 * TELL_S and pull.told >= 0:
        pull.told += TELL_S  # a message from the beginning of the stall lies before the bytes
        see(pull, moment, pull.told_end)
    pull.has_stalled = False
    whole = False
    while pull.raw >= min(pull.bucket, part.end - part.upto) - 1e-6 and part.upto < part.end:
        size = min(pull.bucket, part.end - part.upto)
        part.upto, part.moved, whole = part.upto + size, now, True
        pull.raw = max(pull.raw - size, 0.0)
        pull.given_by[pull.source] += size
        pull.choice.took(size)
    if part.upto == part.end:
        pull.done_s = now
        return
    source_end = moment.end_of(pull.source, part.end)
    is_starved = source_end < min(part.upto + pull.bucket, part.end)
    is_due = (whole and now - pull.told >= TELL_S) or (is_starved and now - pull.told >= IDLE_TELL_S)
    if pull.told < 0 or (is_due and not moment.is_still(pull.source.host)):
        pull.told, pull.told_end = now, source_end
        see(pull, moment, source_end)


def see(pull: Pull, moment: Moment, source_end: int) -> None:
    """The puller takes the message that its source sent at ``pull.told``."""
    part = pull.part
    reason = pull.choice.see(sight(pull, moment, source_end))
    part.set_upstream(pull.choice.healthy_rate, is_limited=pull.choice.is_limited)
    if reason:
        pull.left.append(f"at {moment.now:.2f} s: {reason}")
        pull.raw, pull.told = 0.0, -1.0


def sight(pull: Pull, moment: Moment, source_end: int) -> Sight:
    now, source = moment.now, moment.pulls.get(pull.source.host)
    part = None if source is None else source.part
    return Sight(
        at=now,
        upto=pull.part.upto,
        source_end=max(source_end, pull.part.upto),
        held_s=now - pull.told,
        best_rate=0.0 if part is None else max(part.mean_rate(now), part.upstream_rate),
        pullers=sum(other.source == pull.source and other.done_s is None for other in moment.pulls.values()),
        given=pull.given_by[pull.source],
        source_is_limited=part is not None and part.is_limited,
    )
