"""The servers that the provider names. One coroutine watches each server.

A server that died or lost its weights (restarted) leaves service. A server that answers may be sent weights.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Fetching:
    """Servers fetch versions from a store by themselves, so what they report is what they serve."""

    sender: str
    """Name of this trainer process. Versions of another one do not count."""
    reports: Callable[[], Mapping[str, WeightInfo]] | None
    """What each server says, by name. None = they are asked over HTTP."""

    def version(self, key: str) -> int | None:
        """Returns the version of a `WeightInfo.serving`, None if it is not this trainer's."""
        sender, _, version = key.rpartition("/")
        return int(version) if sender.partition(".")[0] == self.sender and version.isdecimal() else None


class Roster:
    """Keeps the list of servers up to date. Use it from one event loop.

    Args:
        servers: returns the policy's current servers. Called often.
        secret: the run's secret.
        attestor: admits servers. None = every server that answers is admitted.
        changed: called when a server becomes ready for weights, takes a version by itself, or leaves service.
        fetching: None = servers take only versions that they are told to pull.
    """

    def __init__(
        self,
        servers: Callable[[], Sequence[Job]],
        *,
        secret: str,
        attestor: Attestor | None,
        changed: Callable[[], object],
        fetching: Fetching | None = None,
    ):
        self._servers, self._secret, self._attestor, self._changed = servers, secret, attestor, changed
        self._members: dict[str, Member] = {}
        self._fetching = fetching
        self._infos: dict[str, WeightInfo] = {}
        self._refused: dict[str, str] = {}
        """Server → what it was serving when it missed its probe."""

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    @property
    def reading(self) -> frozenset[str]:
        """Versions that servers are fetching, as `WeightInfo.reading`."""
        return frozenset(self._infos[name].reading for name in self._members if name in self._infos)

    def refuse(self, name: str) -> None:
        """Does not believe a server that it serves what it served last."""
        if name in self._infos:
            self._refused[name] = self._infos[name].serving

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
                info = await self._ask(member)
                if member.update is None and member.ended == ended:
                    self.see(member, info)
            is_quiet = member.is_up and self._fetching is None
            await asyncio.sleep(WATCH_S if is_quiet else min(WATCH_S, COMING_S * len(self._members)))

    async def _ask(self, member: Member) -> WeightInfo | str | None:
        if self._fetching is None or self._fetching.reports is None:
            return await member.info()
        return self._fetching.reports().get(member.name)

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
            member.workers, self._infos[member.name] = info.workers, info
            takes_weights = bool(info.workers) or self._fetching is not None
            member.is_up = takes_weights and not member.is_expelled and self._admits(member, info.weight_version)
            if self._fetching is not None:
                self._believe(member, self._fetching.version(info.serving), info.serving)
        else:
            member.is_up, member.is_suspect = False, True
        if (member.is_up, member.serves) != before:
            self._changed()

    def _believe(self, member: Member, version: int | None, key: str) -> None:
        """Records which version a server has fetched."""
        version = None if self._refused.get(member.name) == key else version
        if member.report(version) and member.serves is not None and self._attestor is not None:
            self._attestor.took(member.name, member.serves)

    def _admits(self, member: Member, label: str) -> bool:
        return self._attestor is None or self._attestor.admits(member.name, label)
