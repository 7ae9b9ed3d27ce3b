"""The table of work at the workers. Every piece has a ticket and comes back exactly once unless it is cancelled.

The table does not know the purpose of the work. When a worker dies, all of its work is suspect. Suspects run one at a
time, so that only the piece that kills its worker is blamed.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from pipelinerl.actor import failures
from pipelinerl.actor.messages import Failure, GroupFinished, Servers, StartGroup
from pipelinerl.actor.probation import Misses, Proofs
from pipelinerl.actor.workers import Lost
from pipelinerl.records import Rollout


class Workers(Protocol):
    """The part of ``workers.RolloutWorkers`` that the table uses."""

    @property
    def num_rollouts(self) -> int: ...
    def set_servers(self, servers: Servers) -> None: ...
    def start(self, start: StartGroup) -> None: ...
    def cancel(self, ticket: int) -> None: ...
    def poll(self, timeout_s: float) -> Sequence[GroupFinished | Lost]: ...


@dataclass(eq=False, kw_only=True)
class Work:
    """A piece of work. Each kind of work is a subclass."""

    start: StartGroup
    """``submit`` sets its ticket."""
    suspect: bool = False
    """Whether its worker died while it ran."""

    def narrow(self, attempts: tuple[int, ...]) -> None:
        """Leaves only these attempts to be made."""
        self.start = msgspec.structs.replace(self.start, attempts=attempts)


W = TypeVar("W", bound=Work)


@dataclass(frozen=True, kw_only=True)
class WorkEnded:
    """The outcome of a piece of work."""

    work: Work
    rollouts: tuple[Rollout, ...]
    failures: tuple[Failure, ...]
    aborted_requests: int = 0


class WorkTable:
    """The actor's work at its workers. Used by one thread.

    Args:
        rollouts_per_server: of a server that does not say how many it takes.
    """

    def __init__(self, workers: Workers, rollouts_per_server: int):
        self._workers, self._rollouts_per_server = workers, rollouts_per_server
        self._room = 0
        self._works: dict[int, Work] = {}
        self._next_ticket = 0
        self._suspect: Work | None = None
        self._waiting_suspects: deque[Work] = deque()
        self.misses, self.proofs = Misses(), Proofs()

    @property
    def num_rollouts(self) -> int:
        """Running rollouts."""
        return self._workers.num_rollouts

    def __len__(self) -> int:
        return len(self._works)

    def runs(self, kind: type[Work]) -> bool:
        """Whether work of this kind is at the workers."""
        return any(isinstance(work, kind) for work in self._works.values())

    def all_of(self, kind: type[W]) -> Iterator[W]:
        """Yields the work of this kind, at the workers and among the suspects that wait."""
        return (work for work in (*self._works.values(), *self._waiting_suspects) if isinstance(work, kind))

    def set_servers(self, servers: Servers) -> None:
        """Tells the workers which servers are in service, and which probes those have missed."""
        taking = servers.urls.keys() - set(servers.draining)
        self._room = sum(servers.capacities.get(name, self._rollouts_per_server) for name in taking)
        self._workers.set_servers(msgspec.structs.replace(servers, probes_missed=self.misses.counts))

    def has_room(self, attempts: int) -> bool:
        """Whether the servers have room for this many more rollouts. If no rollout runs, any number fits."""
        running = self._workers.num_rollouts
        return running == 0 or running + attempts <= self._room

    def submit(self, work: Work) -> None:
        """Gives the work to a worker. A suspect waits until no other suspect runs."""
        if work.suspect:
            if self._suspect is not None:
                self._waiting_suspects.append(work)
                return
            self._suspect = work
        self._next_ticket += 1
        work.start = msgspec.structs.replace(work.start, ticket=self._next_ticket)
        self._works[self._next_ticket] = work
        self._workers.start(work.start)

    def cancel(self, kind: type[Work]) -> None:
        """Cancels all work of this kind."""
        for ticket in [ticket for ticket, work in self._works.items() if isinstance(work, kind)]:
            del self._works[ticket]
            self._workers.cancel(ticket)
        self._waiting_suspects = deque(work for work in self._waiting_suspects if not isinstance(work, kind))
        if isinstance(self._suspect, kind):
            self._suspect = None

    def poll(self, timeout_s: float) -> list[WorkEnded]:
        """Returns the work that has ended. Waits up to ``timeout_s`` for messages of the workers.

        Rollouts whose server missed the weight probe for them are among the failures.
        """
        if self._suspect is None and self._waiting_suspects:
            self.submit(self._waiting_suspects.popleft())
        ended: list[WorkEnded] = []
        for result in self._workers.poll(timeout_s):
            if isinstance(result, Lost):
                ended += self._lost(result)
            elif (work := self._take(result.ticket)) is not None:
                work.suspect = False
                rollouts, refused = self.misses.sort(result.rollouts)
                ended.append(
                    WorkEnded(
                        work=work,
                        rollouts=tuple(rollouts),
                        failures=(*result.failures, *refused),
                        aborted_requests=result.aborted_requests,
                    )
                )
        return ended

    def _take(self, ticket: int) -> Work | None:
        work = self._works.pop(ticket, None)
        if work is self._suspect:
            self._suspect = None
        return work

    def _lost(self, lost: Lost) -> list[WorkEnded]:
        ended = []
        for work in [work for ticket in lost.tickets if (work := self._take(ticket)) is not None]:
            work.suspect = True
            detail = f"the worker process ended with exit code {lost.exit_code} during this group"
            failed = tuple(
                Failure(attempt=attempt, reason=failures.POISONOUS, detail=detail) for attempt in work.start.attempts
            )
            ended.append(WorkEnded(work=work, rollouts=(), failures=failed))
        return ended
