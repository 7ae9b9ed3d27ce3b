"""The table of work at the workers. Every piece has a task id and comes back exactly once unless it is cancelled.

When a worker dies, all of its work is suspect and runs again, half of it at once. A piece has failed only when its
worker died without another suspect in it, so the piece that kills is found.
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from pipelinerl.actor.messages import Failure, GroupFinished, Servers, StartGroup
from pipelinerl.actor.publish_gate import Misses, PublishGate
from pipelinerl.actor.worker_pool import Lost, RolloutWorkers
from pipelinerl.records.drops import DropReason

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Work:
    """A piece of work. Each kind of work is a subclass."""

    start: StartGroup
    """``submit`` sets its task id."""
    suspect: bool = False
    """Whether its worker died while it ran, and it has not ended since."""

    def narrow(self, attempts: tuple[int, ...]) -> None:
        """Leaves only these attempts to be made."""
        self.start = msgspec.structs.replace(self.start, attempts=attempts)


W = TypeVar("W", bound=Work)


class WorkTable:
    """The actor's work at its workers. Used by one thread.

    Args:
        rollouts_per_server: for a server whose lease has no number.
    """

    def __init__(self, workers: RolloutWorkers, rollouts_per_server: int):
        self._workers, self._rollouts_per_server = workers, rollouts_per_server
        self._room = 0
        self._works: dict[int, Work] = {}
        self._next_task_id = 0
        self._suspects: deque[Work] = deque()
        """Suspects that wait."""
        self._suspects_at_once = 1
        self.misses, self.gate = Misses(), PublishGate()

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
        return (work for work in (*self._works.values(), *self._suspects) if isinstance(work, kind))

    def set_servers(self, servers: Servers) -> None:
        """Tells the workers which servers are in service, and which probes those have missed."""
        taking = servers.urls.keys() - set(servers.draining)
        self._room = sum(servers.capacities.get(name, self._rollouts_per_server) for name in taking)
        self._workers.set_servers(msgspec.structs.replace(servers, probes_missed=self.misses.counts))

    def has_room(self, attempts: int) -> bool:
        """Whether the servers have room for this many more rollouts. If no rollout runs, any number fits."""
        running = self._workers.num_rollouts
        return running == 0 or running + attempts <= self._room

    def share_free(self, most: float) -> float:
        """Unused share of the servers' room, or of room for ``most`` rollouts if that is less."""
        usable = min(self._room, most)
        return max(0.0, 1.0 - self._workers.num_rollouts / usable) if usable else 0.0

    def submit(self, work: Work) -> None:
        """Gives the work to a worker. A suspect waits until few enough of them run, but not behind others."""
        if work.suspect:
            self._suspects.appendleft(work)
            self._start_suspects()
        else:
            self._start(work)

    def cancel(self, kind: type[Work]) -> None:
        """Cancels all work of this kind."""
        for task_id in [task_id for task_id, work in self._works.items() if isinstance(work, kind)]:
            del self._works[task_id]
            self._workers.cancel(task_id)
        self._suspects = deque(work for work in self._suspects if not isinstance(work, kind))

    def poll(self, timeout_s: float) -> list[tuple[Work, GroupFinished]]:
        """Returns the work that has ended, after at most ``timeout_s``. Failures include what missed a weight probe."""
        self._start_suspects()
        ended: list[tuple[Work, GroupFinished]] = []
        for result in self._workers.poll(timeout_s):
            if isinstance(result, Lost):
                ended += self._lost(result)
            elif (work := self._works.pop(result.task_id, None)) is not None:
                self._suspects_at_once += work.suspect
                work.suspect = False
                rollouts, refused = self.misses.sort(result.rollouts)
                failures = (*result.failures, *refused)
                ended.append((work, replace(result, rollouts=tuple(rollouts), failures=failures)))
        return ended

    def _start(self, work: Work) -> None:
        self._next_task_id += 1
        work.start = msgspec.structs.replace(work.start, task_id=self._next_task_id)
        self._works[self._next_task_id] = work
        self._workers.start(work.start)

    def _start_suspects(self) -> None:
        if not self._suspects:
            return
        running = sum(work.suspect for work in self._works.values())
        while self._suspects and running < self._suspects_at_once:
            self._start(self._suspects.popleft())
            running += 1

    def _lost(self, lost: Lost) -> list[tuple[Work, GroupFinished]]:
        """Has the work of a dead worker run again, or blames the only suspect in it."""
        works = [work for task_id in lost.task_ids if (work := self._works.pop(task_id, None)) is not None]
        if not works:
            return []
        suspected, others = [work for work in works if work.suspect], [work for work in works if not work.suspect]
        if not suspected:
            suspected, others = others, []
        self._suspects.extend(others)
        self._suspects_at_once = max(1, len(suspected) // 2)
        for work in works:
            work.suspect = True
        if len(suspected) == 1:
            return [(suspected[0], _blamed(suspected[0].start, lost))]
        self._suspects.extendleft(reversed(suspected))
        log.warning("event=suspects groups=%d at_once=%d", len(self._suspects), self._suspects_at_once)
        return []


def _blamed(start: StartGroup, lost: Lost) -> GroupFinished:
    """Returns a group with all of its attempts failed."""
    detail = f"the worker process ended with exit code {lost.exit_code} during this group"
    failed = tuple(Failure(attempt=attempt, reason=DropReason.POISONOUS, detail=detail) for attempt in start.attempts)
    return GroupFinished(task_id=start.task_id, rollouts=(), failures=failed)
