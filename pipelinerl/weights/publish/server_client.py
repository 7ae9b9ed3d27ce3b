"""The trainer's view of one server, over HTTP: whether it answers, which version it holds, which one it serves."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Sequence
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
from pipelinerl.world import Job

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
GRACE_S = 1.0
"""Added to an update's timeout, so that the server's own deadline fires first and reports the reason."""
UNREADABLE = (ValueError, RecursionError)
"""What decoding an answer raises: an error of msgspec, text that is not UTF-8, or deep nesting."""
GONE = "gone"
"""Takes the place of a version if no process listens at the server's address."""


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

    def fetch(self, outcome: "UpdateOutcome") -> None:
        """Records what it took for the server to fetch the version that it serves."""
        self.last = outcome

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
    """Says once that a server's certificate is refused, because the server looks like one that is not there."""
    log.warning("event=server_not_trusted server=%s url=%s error=%s", name, url, error)
