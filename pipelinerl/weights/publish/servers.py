"""The servers as the trainer sees them over HTTP: one (`ServerClient`), and all that the provider names (`ServerPool`).

Of each server: whether it answers, which version it holds, which one it serves. A coroutine watches each.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import (
    INFO_PATH,
    PATH,
    STALE,
    Address,
    Link,
    WeightInfo,
    WeightUpdateAnswer,
    WeightUpdateFailure,
    WeightUpdateRequest,
)
from pipelinerl.weights.verify.checker import FROM_FILE, WeightChecker
from pipelinerl.world import Job
from pipelinerl.world.proxies import own_client

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
"""A server that accepts no connection, or does not tell its state, within this time is not up: its engine is frozen."""
GRACE_S = 1.0
"""Added to an update's timeout, so that the server's own deadline fires first and reports the reason."""
UNREADABLE = (ValueError, RecursionError)
"""What decoding an answer raises: an error of msgspec, text that is not UTF-8, or deep nesting."""
GONE = "gone"
"""Takes the place of a version if no process listens at the server's address."""
WATCH_S = 1.0
"""Time between two questions to a server about its state."""
COMING_S = 0.1
"""The same for a server that is not up, times the number of servers: a start must not wait for the next question."""


class FailedPullError(WeightUpdateError):
    """A server says that its update failed. ``links``: what its workers saw of their sources."""

    def __init__(self, message: str, links: Sequence[Link]):
        super().__init__(message)
        self.links = tuple(links)


@dataclass(eq=False)
class ServerClient:
    """One server."""

    job: Job
    http: httpx.AsyncClient
    workers: tuple[Address, ...] = ()
    has_answered: bool = False
    is_up: bool = False
    """It answers, and may be sent weights."""
    is_suspect: bool = False
    """It did not answer, failed or was held up, so others should not depend on it."""
    is_expelled: bool = False
    """It missed its probe twice and is never used again in this run."""
    serves: int | None = None
    """Version that it serves. None = it is out of service."""
    held: int | None = None
    """Version of this sender whose bytes its workers hold."""
    update: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None
    ended: int = 0
    """Number of ended updates. The result of a probe that began before an update ended is ignored."""
    last: "UpdateOutcome | None" = None
    refused_at: float | None = None
    """When it began to refuse updates, by `time.monotonic`. None = it took the last one, or does not answer."""

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def node(self) -> str:
        """Host of its workers. Its job does not always say the node: one that joined, or moved on Ray, has none."""
        return self.workers[0].host if self.workers else ""

    @property
    def is_policy(self) -> bool:
        """Whether it samples with the version that it serves, and so is checked and announced. A teacher does not."""
        return self.job.kind == "actor_llm"

    def record_outcome(self, outcome: "UpdateOutcome") -> None:
        """Records the end of an update: the server serves the version, was held up by others, or is out of service."""
        self.last, self.update = outcome, None
        self.ended += 1
        if outcome.answer is not None:
            self.held, self.serves = outcome.version, None if self.is_expelled else outcome.version
            self.is_suspect, self.refused_at = False, None
        elif outcome.is_held_up:
            self.is_suspect = True  # others should not depend on it until it has a version
            log.warning("event=server_held_up server=%s version=%d error=%s", self.name, outcome.version, outcome.error)
        elif STALE not in outcome.error:  # a server without the delta's base gets the whole version at once
            self.refused_at = time.monotonic() if self.refused_at is None else self.refused_at
            log.error(
                "event=server_out_of_service server=%s version=%d error=%s", self.name, outcome.version, outcome.error
            )
            self.drop()

    def report(self, serves: int | None) -> bool:
        """Records which version the server says that it serves. Returns whether it is another one."""
        before, self.serves = self.serves, None if self.is_expelled else serves
        return before != self.serves

    def miss(self, *, is_final: bool) -> None:
        """Takes a server that missed its probe out of service, permanently if ``is_final``."""
        self.held = self.serves = None
        self.is_up, self.is_expelled = not is_final, is_final

    def drop(self) -> None:
        """Takes the server out of service until it answers again."""
        self.serves = self.held = None
        self.is_up, self.is_suspect = False, True

    async def info(self) -> WeightInfo | str | None:
        """Asks the server for its state. Returns ``GONE`` if no process listens, None if it does not answer."""
        # The question passes through the engine's loop, so a frozen engine behind a live HTTP server is not up.
        with contextlib.suppress(httpx.HTTPError, *UNREADABLE):
            try:
                response = await self.http.get(INFO_PATH, timeout=PROBE_TIMEOUT_S)
            except httpx.ConnectError as error:
                if "SSL" in str(error):
                    _warn_once(self.name, self.job.url, str(error))
                return GONE
            if response.status_code == 200:
                return msgspec.json.decode(response.content, type=WeightInfo)
        return None

    async def post(self, request: WeightUpdateRequest, timeout_s: float) -> WeightUpdateAnswer:
        """Sends an update request. Returns when the version is live.

        Args:
            timeout_s: longer than that of the request: a slow server notices its own only between two buckets.

        Raises:
            FailedPullError: the server says that the update failed.
            WeightUpdateError: it timed out, or ended with an answer that cannot be read.
        """
        timeout = httpx.Timeout(timeout_s + GRACE_S, connect=PROBE_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        try:
            response = await self.http.post(
                PATH, content=msgspec.json.encode(request), headers=headers, timeout=timeout
            )
        except httpx.TimeoutException as error:
            raise WeightUpdateError(
                f"{self.name} has not version {request.version} within weights.timeout_s={timeout_s:g}"
            ) from error
        except httpx.HTTPError as error:
            raise WeightUpdateError(f"{self.name} at {self.job.url}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            said = f"{self.name} answered {response.status_code}: {response.text[:500]}"
            try:
                failure = msgspec.json.decode(response.content, type=WeightUpdateFailure)
            except UNREADABLE:
                raise WeightUpdateError(said) from None
            raise FailedPullError(said, failure.links)
        try:
            return msgspec.json.decode(response.content, type=WeightUpdateAnswer)
        except UNREADABLE as error:
            raise WeightUpdateError(f"{self.name} answered 200 and no weight update's answer: {error}") from error

    async def close(self) -> None:
        for task in (self.update, self.watch):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, WeightUpdateError):
                    await task
        await self.http.aclose()


@dataclass(frozen=True, kw_only=True)
class UpdateOutcome:
    """Result of an update of one server."""

    version: int
    num_bytes: int
    """Length of the payload."""
    seconds: float
    answer: WeightUpdateAnswer | None = None
    error: str = ""
    is_held_up: bool = False
    """It failed, and not through a fault of its own link."""


@functools.cache
def _warn_once(name: str, url: str, error: str) -> None:
    """Logs a refused certificate once. Without it, such a server looks like one that is not there."""
    log.warning("event=server_not_trusted server=%s url=%s error=%s", name, url, error)


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
        """Ignores a server's reports of the version that it served when it missed its probe."""
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
        before, checker = (client.is_up, client.serves), self.checker_of(client)
        label = info.weight_version if isinstance(info, WeightInfo) else info
        if client.serves is not None and label in (FROM_FILE, GONE):
            log.warning("event=server_lost_weights server=%s version=%s", client.name, label)
            client.drop()
            if checker is not None:
                checker.stop_check(client.name)
        if isinstance(info, WeightInfo):
            client.workers, self._infos[client.name] = info.workers, info
            client.has_answered = True
            may_serve = not client.is_expelled and (bool(info.workers) or self._fetching is not None)
            client.is_up = may_serve and (checker is None or checker.admits(client.name, info.weight_version))
            if self._fetching is not None:
                is_refused = self._refused.get(client.name) == info.serving
                serves = None if is_refused else self._fetching.version(info.serving)
                if client.report(serves) and client.serves is not None and checker is not None:
                    checker.start_check(client.name, client.serves)
        else:
            client.is_up, client.is_suspect, client.refused_at = False, True, None
        if (client.is_up, client.serves) != before:
            self._changed()
