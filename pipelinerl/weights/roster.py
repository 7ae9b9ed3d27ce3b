"""The servers that the provider names. One coroutine watches each server.

A server that died or lost its weights (restarted) leaves service. A server that answers may be sent weights.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

import httpx

from pipelinerl.weights.attestor import FROM_FILE, Attestor
from pipelinerl.weights.member import GONE, Member
from pipelinerl.weights.protocol import WeightInfo
from pipelinerl.world import Job
from pipelinerl.world.tls import client_context

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""Time between two questions to a server about its state."""
COMING_S = 0.1
"""The same for a server that is not up, times the number of servers: a start must not wait for the next question."""


class Roster:
    """Keeps the list of servers up to date. Use it from one event loop.

    Args:
        servers: returns the policy's current servers. Called often.
        secret: the run's secret.
        attestor: admits servers. None = every server that answers is admitted.
        changed: called when a server becomes ready for weights or leaves service.
    """

    def __init__(
        self,
        servers: Callable[[], Sequence[Job]],
        *,
        secret: str,
        attestor: Attestor | None,
        changed: Callable[[], object],
    ):
        self._servers, self._secret, self._attestor, self._changed = servers, secret, attestor, changed
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    async def follow(self) -> None:
        """Adds and removes members, because servers may come, leave or change their address at any time."""
        jobs = {job.name: job for job in self._servers()}
        for name, member in tuple(self._members.items()):
            if name not in jobs or jobs[name].url != member.job.url:
                del self._members[name]
                if self._attestor is not None:
                    self._attestor.forget(name)
                await member.close()
        for name, job in jobs.items():
            if name not in self._members:
                limits = httpx.Limits(max_connections=None)
                headers = {"Authorization": f"Bearer {self._secret}"}
                client = httpx.AsyncClient(base_url=job.url, headers=headers, limits=limits, verify=client_context())
                self._members[name] = member = Member(job, client)
                if self._attestor is not None:
                    self._attestor.meet(job)
                member.watch = asyncio.create_task(self._watch(member))

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self))

    async def _watch(self, member: Member) -> None:
        """Asks the server for its state every ``WATCH_S``, more often until it is up. Ends with its membership."""
        while True:
            ended = member.ended
            if member.update is None:
                info = await member.info()
                if member.update is None and member.ended == ended:
                    self.see(member, info)
            await asyncio.sleep(WATCH_S if member.is_up else min(WATCH_S, COMING_S * len(self._members)))

    def see(self, member: Member, info: WeightInfo | str | None) -> None:
        """Updates the member from the server's answer."""
        before = member.is_up, member.serves
        label = info.weight_version if isinstance(info, WeightInfo) else info
        if member.serves is not None and label in (FROM_FILE, GONE):
            log.warning("event=server_lost_weights server=%s version=%s", member.name, label)
            member.drop()
            if self._attestor is not None:
                self._attestor.left(member.name)
        if isinstance(info, WeightInfo):
            member.workers = info.workers
            member.is_up = bool(info.workers) and not member.is_expelled and self._admits(member, info.weight_version)
        else:
            member.is_up, member.is_suspect = False, True
        if (member.is_up, member.serves) != before:
            self._changed()

    def _admits(self, member: Member, label: str) -> bool:
        return self._attestor is None or self._attestor.admits(member.name, label)
