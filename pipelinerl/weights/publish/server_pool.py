"""The servers that the provider names, each watched by a coroutine."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import WeightInfo
from pipelinerl.weights.publish.server_client import GONE, ServerClient
from pipelinerl.weights.verify.checker import FROM_FILE, WeightChecker
from pipelinerl.world import Job
from pipelinerl.world.proxies import own_client

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


class ServerPool:
    """Keeps the list of servers up to date. Use it from one event loop.

    Args:
        servers: returns the policy's current servers. Called often.
        checker: admits servers. None = every server that answers is admitted.
        changed: called when a server becomes ready for weights, takes a version by itself, or leaves service.
        fetching: None = servers take only versions that they are told to pull.
    """

    def __init__(
        self,
        servers: Callable[[], Sequence[Job]],
        *,
        secret: str,
        checker: WeightChecker | None,
        changed: Callable[[], object],
        fetching: Fetching | None = None,
    ):
        self._servers, self._secret, self._checker, self._changed = servers, secret, checker, changed
        self._clients: dict[str, ServerClient] = {}
        self._fetching = fetching
        self._infos: dict[str, WeightInfo] = {}
        self._refused: dict[str, str] = {}
        """Server → what it was serving when it missed its probe."""

    def __iter__(self) -> Iterator[ServerClient]:
        return iter(tuple(self._clients.values()))

    def get(self, name: str) -> ServerClient | None:
        return self._clients.get(name)

    @property
    def reading(self) -> frozenset[str]:
        """Versions that servers are fetching, as `WeightInfo.reading`."""
        return frozenset(self._infos[name].reading for name in self._clients if name in self._infos)

    def check_refusals(self, patience_s: float) -> None:
        """Raises an error if every server of the policy answers, but has taken no update for ``patience_s``.

        Raises:
            WeightUpdateError: names the servers and what they said last.
        """
        clients, now = [client for client in self if client.is_policy], time.monotonic()
        refused = [client for client in clients if client.refused_at and now - client.refused_at > patience_s]
        if refused and len(refused) == len(clients):
            said = "; ".join(client.last.error for client in refused if client.last is not None)
            raise WeightUpdateError(f"no server has taken an update for {patience_s:g} s: {said[:1000]}")

    def refuse(self, name: str) -> None:
        """Does not believe a server that it serves what it served last."""
        if name in self._infos:
            self._refused[name] = self._infos[name].serving

    def checker_of(self, client: ServerClient) -> WeightChecker | None:
        """The checker of a policy's server. None: what the server makes of a version is not checked."""
        return self._checker if client.is_policy else None

    async def follow(self) -> None:
        """Adds and removes members, because servers may come, leave or change their address at any time."""
        jobs = {job.name: job for job in self._servers()}
        for name, client in tuple(self._clients.items()):
            if name not in jobs or jobs[name].url != client.job.url:
                del self._clients[name]
                if checker := self.checker_of(client):
                    checker.remove_server(name)
                await client.close()
        for name, job in jobs.items():
            if name not in self._clients:
                limits = httpx.Limits(max_connections=None)
                headers = {"Authorization": f"Bearer {self._secret}"}
                http = httpx.AsyncClient(base_url=job.url, headers=headers, limits=limits, **own_client())
                self._clients[name] = client = ServerClient(job, http)
                if checker := self.checker_of(client):
                    checker.add_server(job)
                client.watch = asyncio.create_task(self._watch(client))

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self))

    async def _watch(self, client: ServerClient) -> None:
        """Asks the server for its state every ``WATCH_S``, more often until it is up. Ends with its membership."""
        while True:
            ended = client.ended
            if client.update is None:
                info = await self._ask(client)
                if client.update is None and client.ended == ended:
                    self.record_info(client, info)
            is_quiet = client.is_up and self._fetching is None
            await asyncio.sleep(WATCH_S if is_quiet else min(WATCH_S, COMING_S * len(self._clients)))

    async def _ask(self, client: ServerClient) -> WeightInfo | str | None:
        if self._fetching is None or self._fetching.reports is None:
            return await client.info()
        return self._fetching.reports().get(client.name)

    def record_info(self, client: ServerClient, info: WeightInfo | str | None) -> None:
        """Updates the client from the server's answer."""
        before = client.is_up, client.serves
        label = info.weight_version if isinstance(info, WeightInfo) else info
        if client.serves is not None and label in (FROM_FILE, GONE):
            log.warning("event=server_lost_weights server=%s version=%s", client.name, label)
            client.drop()
            if checker := self.checker_of(client):
                checker.stop_check(client.name)
        if isinstance(info, WeightInfo):
            client.workers, self._infos[client.name] = info.workers, info
            client.has_answered = True
            takes_weights = bool(info.workers) or self._fetching is not None
            client.is_up = takes_weights and not client.is_expelled and self._admits(client, info.weight_version)
            if self._fetching is not None:
                self._record_version(client, self._fetching.version(info.serving), info.serving)
        else:
            client.is_up, client.is_suspect, client.refused_at = False, True, None
        if (client.is_up, client.serves) != before:
            self._changed()

    def _record_version(self, client: ServerClient, version: int | None, key: str) -> None:
        version = None if self._refused.get(client.name) == key else version
        if client.report(version) and client.serves is not None and (checker := self.checker_of(client)):
            checker.start_check(client.name, client.serves)

    def _admits(self, client: ServerClient, label: str) -> bool:
        checker = self.checker_of(client)
        return checker is None or checker.admits(client.name, label)
