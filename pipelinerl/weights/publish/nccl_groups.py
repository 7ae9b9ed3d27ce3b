"""Which NCCL groups the servers and the trainer's ranks need, and how they are formed (docs/weights.md)."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field

import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import Address, Failed, Joined, JoinGroup
from pipelinerl.weights.publish.versions import Dispatch
from pipelinerl.weights.transfer.nccl import END_S, Groups
from pipelinerl.weights.transfer.wire import Connection, WireError

log = logging.getLogger(__name__)

MOST_GROUPS = 4
"""Most groups of one process, because each takes memory of its GPU."""
MOST_SKIPPED = 64
"""A group that failed is tried again after one update, then after two, four, … up to this many."""
MEMBER_THREADS = 64
"""Members that are asked to join at a time."""
GRACE_S = 1.0
"""Added to a member's own deadline, so that its error comes before ours."""
_replies: msgspec.json.Decoder[Joined | Failed] = msgspec.json.Decoder(Joined | Failed)


@dataclass(frozen=True)
class GroupPlan:
    """Members of a group."""

    sources: tuple[Address, ...]
    pullers: tuple[Address, ...]

    @property
    def members(self) -> tuple[Address, ...]:
        return self.sources + self.pullers

    def covers(self, other: "GroupPlan") -> bool:
        """Whether a group of this plan can be used in place of one of the other."""
        return set(other.sources) <= set(self.sources) and set(other.pullers) <= set(self.pullers)


def planned_groups(dispatches: Iterable[Dispatch], ranks: Sequence[Address]) -> list[GroupPlan]:
    """Returns the groups over which these updates get most of their bytes: that of the ranks first, then the pairs.

    Late servers need none. Workers of one server are no pairs, because each keeps another shard.
    """
    heads, pairs = dict[Address, None](), dict[tuple[Address, Address], None]()
    for dispatch in dispatches:
        if not dispatch.is_chained:
            continue
        own = set(dispatch.client.workers)
        for worker, parts in zip(dispatch.client.workers, dispatch.route, strict=True):
            for part in parts:
                source = next(source for source in part.sources if source not in own)
                if source in ranks:
                    heads[worker] = None
                else:
                    pairs[source, worker] = None
    plans = [GroupPlan(tuple(ranks), tuple(sorted(heads, key=str)))] if heads else []
    counts = Counter(member for plan in plans for member in plan.members)
    for source, worker in pairs:
        if max(counts[source], counts[worker]) < MOST_GROUPS:
            plans.append(GroupPlan((source,), (worker,)))
            counts.update(plans[-1].members)
    return plans


def rounds(plans: Iterable[GroupPlan]) -> list[list[GroupPlan]]:
    """Divides groups into rounds, so that no process joins two at once: each would wait for members of the other."""
    made: list[list[GroupPlan]] = []
    for plan in plans:
        free = (one for one in made if all(set(plan.members).isdisjoint(other.members) for other in one))
        together = next(free, None)
        if together is None:
            made.append([plan])
        else:
            together.append(plan)
    return made


def kept(held: Iterable[GroupPlan], wanted: Sequence[GroupPlan]) -> set[GroupPlan]:
    """Returns the groups that stay: those that are wanted, and others as long as their members have room for those."""
    held, stay = list(held), set[GroupPlan]()
    counts = Counter(member for plan in wanted for member in plan.members)
    for plan in wanted:
        for one in held:
            further = set(one.members) - set(plan.members)
            # A larger group takes its place if its further members have room, too.
            if one.covers(plan) and all(counts[member] < MOST_GROUPS for member in further):
                stay.add(one)
                counts.update(further)
                break
    for plan in held:
        if plan not in stay and all(counts[member] < MOST_GROUPS for member in plan.members):
            stay.add(plan)
            counts.update(plan.members)
    return stay


@dataclass
class _Failure:
    """What is known of a group that did not form."""

    count: int = 0
    skipped: int = 0


@dataclass(eq=False)
class NcclGroups:
    """The groups of a run. One thread uses it at a time.

    Args:
        own: rank 0's own, which names new communicators.
        stall_s: a group must form within this time.
    """

    own: Groups
    sender: str
    secret: str
    stall_s: float
    failed: int = 0
    """Groups that did not form, or broke although their members are still there."""
    _held: dict[GroupPlan, list[Connection]] = field(default_factory=dict)
    _failures: dict[GroupPlan, _Failure] = field(default_factory=dict)
    _made: int = 0

    def bring(self, wanted: Sequence[GroupPlan]) -> None:
        """Forms the groups that are missing, and ends those that broke or are in the way. Takes at most ``stall_s``."""
        there = {member for plan in wanted for member in plan.members}
        for plan, connections in list(self._held.items()):
            if any(connection.is_hung_up for connection in connections):
                log.warning("event=nccl_group_ended members=%d reason=a member has left", len(connections))
                self.failed += set(plan.members) <= there  # others left because their server has
                self._end(plan)
        stay = kept(self._held, wanted)
        for plan in set(self._held) - stay:
            self._end(plan)
        missing = [plan for plan in wanted if not any(one.covers(plan) for one in stay) and self._is_due(plan)]
        deadline = time.monotonic() + self.stall_s
        for plans in rounds(missing):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            with ThreadPoolExecutor(len(plans), thread_name_prefix="nccl-group") as pool:
                self.failed += [*pool.map(lambda plan, left_s=left_s: self._form(plan, left_s), plans)].count(False)

    def close(self) -> None:
        for plan in list(self._held):
            self._end(plan)

    def _is_due(self, plan: GroupPlan) -> bool:
        failure = self._failures.get(plan)
        if failure is None:
            return True
        failure.skipped += 1
        return failure.skipped > min(2 ** (failure.count - 1), MOST_SKIPPED)

    def _form(self, plan: GroupPlan, timeout_s: float) -> bool:
        """Has all members join, each in its own thread, or none. Returns whether they did."""
        began, members, connections = time.monotonic(), plan.members, list[Connection]()
        try:
            unique_id = self.own.unique_id(timeout_s)
            self._made += 1
            name = f"{self.sender}/{self._made}/{unique_id[:8].hex()}"
            left_s = max(timeout_s - (time.monotonic() - began), 0.1)

            def ask(rank: int) -> Connection:
                order = JoinGroup(
                    name=name,
                    sender=self.sender,
                    unique_id=unique_id.hex(),
                    members=members,
                    num_sources=len(plan.sources),
                    rank=rank,
                    timeout_s=left_s,
                )
                connection = Connection.dial(members[rank], self.secret, left_s + GRACE_S)
                connections.append(connection)
                connection.send_message(order)
                return connection

            with ThreadPoolExecutor(min(len(members), MEMBER_THREADS), thread_name_prefix="nccl-member") as pool:
                for connection in pool.map(ask, range(len(members))):
                    reply: Joined | Failed = connection.receive_answer(_replies)
                    if isinstance(reply, Failed):
                        raise WireError(reply.error)
        except (WireError, WeightUpdateError) as error:
            for connection in connections:
                connection.close()
            failure = self._failures.setdefault(plan, _Failure())
            failure.count, failure.skipped = failure.count + 1, 0
            log.warning("event=nccl_group_failed members=%d failures=%d error=%s", len(members), failure.count, error)
            return False
        self._failures.pop(plan, None)
        self._held[plan] = connections
        seconds = time.monotonic() - began
        log.info("event=nccl_group_formed sources=%d pullers=%d s=%.2f", len(plan.sources), len(plan.pullers), seconds)
        return True

    def _end(self, plan: GroupPlan) -> None:
        """Returns when all members have left, because their memory is wanted for other groups."""
        connections = self._held.pop(plan)
        for connection in connections:
            connection.end_sending()
        for connection in connections:
            with closing(connection), suppress(WireError):
                connection.set_patience(END_S + GRACE_S)
                connection.receive()
