"""A role's view of the others' leases, which a thread keeps up to date.

Consumes: the store, every `LOOK_S`. Produces: ``observed``. Deletes leases that ran out long ago. Waits for: nothing.
While the store is away the last view stays valid and no lease runs out. Ends: at ``close``.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pipelinerl.membership.lease import PROTOCOL, LiveServer, Observed, observe, servers_now
from pipelinerl.membership.stores import LeaseStore, StoreAwayError
from pipelinerl.world import Job

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Much shorter than a server's start, and only two small reads a second per process."""


class ServerView(Protocol):
    """A view of the servers that are in the run now."""

    def servers(self, kind: str, serves: int | None = None) -> dict[str, LiveServer]:
        """Return the servers of this kind by name. ``serves``: only one actor's or preprocessor's."""
        ...


class PlacedJobs:
    """The view of a run without leases: every placed server is always there."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs = tuple(jobs)

    def servers(self, kind: str, serves: int | None = None) -> dict[str, LiveServer]:
        return of_replica(servers_now(self._jobs, Observed(), kind), serves)


class MembershipWatch:
    """The members of a run, in the view of this process.

    Args:
        initial: the jobs that the launcher placed.

    Example:
        >>> from pipelinerl.membership.stores import FolderStore
        >>> watch = MembershipWatch(FolderStore(run_dir), world.jobs)  # doctest: +SKIP
        >>> watch.servers("actor_llm")  # doctest: +SKIP
        {'actor_llm_0': LiveServer(job=Job(name='actor_llm_0', …), is_draining=False)}
    """

    def __init__(self, store: LeaseStore, initial: Sequence[Job]):
        self._store, self._initial = store, tuple(initial)
        self._observed = Observed()
        self._is_away = False
        self._closed = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._run, name="members", daemon=True)
        self._thread.start()

    @property
    def observed(self) -> Observed:
        """The result of the last look at the store."""
        return self._observed

    def servers(self, kind: str, serves: int | None = None) -> dict[str, LiveServer]:
        return of_replica(servers_now(self._initial, self._observed, kind), serves)

    def look(self) -> None:
        """Read the store once and update the view."""
        try:
            members = self._store.leases()
        except StoreAwayError as error:
            if not self._is_away:
                log.warning("event=members_not_seen reason=%s", error)
            self._is_away = True
            return
        self._is_away = False
        before, self._observed = self._observed, observe(self._observed, members, time.monotonic())
        self._notify(before)
        for lease in self._observed.forgotten():
            with contextlib.suppress(StoreAwayError):
                self._store.remove(lease)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.look()

    def _notify(self, before: Observed) -> None:
        was, now = before.alive(), self._observed.alive()
        for name in now.keys() - was.keys():
            log.info("event=member_came name=%s url=%s state=%s", name, now[name].url, now[name].state)
            if now[name].protocol != PROTOCOL:
                log.warning("event=member_not_used name=%s protocol=%d ours=%d", name, now[name].protocol, PROTOCOL)
        for name in was.keys() - now.keys():
            ran_out = name in self._observed.sightings
            log.info("event=member_went name=%s reason=%s", name, "its lease ran out" if ran_out else "it left")


def of_replica(servers: Mapping[str, LiveServer], serves: int | None) -> dict[str, LiveServer]:
    return {name: server for name, server in servers.items() if serves in (None, server.job.serves)}
