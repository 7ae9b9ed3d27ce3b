"""Follows the answers that servers are sampling for a worker: how long they are, and when they last grew.

An answer comes as a whole, so servers are asked once a second what they sample for this worker. Time limits of requests
and rollouts can then measure stillness, and the actor counts tokens before their rollouts end.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakSet

import aiohttp
import msgspec

from pipelinerl.actor.servers import InferenceServer
from pipelinerl.records.answers import UNDER_WAY_PATH, RequestUnderWay, UnderWay

log = logging.getLogger(__name__)

FOLLOW_S = 1.0
"""Interval of the questions, and the age from which a request is followed."""
GROWING_S = 60.0
"""An answer that has grown within this time is growing. An engine's step may take seconds on a busy machine."""
ASK_TIMEOUT_S = GROWING_S / 2
"""One question that gets no answer does not make a growing answer a still one."""


@dataclass(eq=False)
class Growth:
    """An answer of a server, or several to one prompt, while they are sampled."""

    tokens: int = 0
    """Sampled so far, as far as this worker knows."""
    longest: int = 0
    """Tokens of the longest answer."""
    moved: float = field(default_factory=time.monotonic)
    """When it was sent, or last grew. A request that waits for its turn moves while its server samples others."""
    grew: float | None = None
    """When a report of the server last showed that it had moved."""

    def is_growing(self, now: float) -> bool:
        return self.grew is not None and now - self.grew < GROWING_S

    def restart(self) -> None:
        """The request is sent again: nothing is sampled of it."""
        self.tokens, self.longest, self.moved, self.grew = 0, 0, time.monotonic(), None


@dataclass(eq=False)
class _Sent:
    server: InferenceServer
    growth: Growth
    sent: float
    seen: RequestUnderWay | None = None
    sampled_by_server: int = -1


class Followed:
    """The requests of one worker that are under way, and the tokens that were sampled for it.

    >>> name = followed.begin(server, growth)
    >>> followed.end(name, lengths=[812])
    """

    def __init__(self) -> None:
        self._prefix, self._numbers = f"{uuid.uuid4().hex[:12]}-", itertools.count()
        self._requests: dict[str, _Sent] = {}
        self._mute: WeakSet[InferenceServer] = WeakSet()
        """Servers that have no such path. Those that answer anything else are asked again."""
        self.tokens = 0
        """Sampled for this worker since it began, answers under way included."""

    @property
    def longest(self) -> int:
        """Tokens of the longest answer under way."""
        return max((request.growth.longest for request in self._requests.values()), default=0)

    def begin(self, server: InferenceServer, growth: Growth) -> str:
        """Follow a request that is being sent, and return its name."""
        growth.restart()
        name = f"{self._prefix}{next(self._numbers)}"
        self._requests[name] = _Sent(server, growth, time.monotonic())
        return name

    def end(self, name: str, lengths: Iterable[int] = ()) -> None:
        """Forget a request. ``lengths``: tokens of its answers, if it has any."""
        growth = self._requests.pop(name).growth
        self.tokens += max(0, sum(lengths) - growth.tokens)

    async def ask(self, session: aiohttp.ClientSession, token: str) -> None:
        """Ask every server that has had a request for a while how far its answers are."""
        old = time.monotonic() - FOLLOW_S
        servers = {request.server for request in self._requests.values() if request.sent < old}
        servers.difference_update(self._mute)
        await asyncio.gather(*(self._ask(session, server, token) for server in servers))

    async def _ask(self, session: aiohttp.ClientSession, server: InferenceServer, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with session.get(
                server.url.rstrip("/") + UNDER_WAY_PATH,
                params={"prefix": self._prefix},
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S),
            ) as response:
                if response.status in (404, 405):
                    self._mute.add(server)
                    log.info("event=server_tells_no_growth server=%s status=%d", server.name, response.status)
                if response.status != 200:
                    return
                report = msgspec.json.decode(await response.read(), type=UnderWay)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError):
            return  # the request itself finds out what is wrong
        self.add_report(server, report, time.monotonic())

    def add_report(self, server: InferenceServer, report: UnderWay, now: float) -> None:
        for name, seen in report.requests.items():
            request = self._requests.get(name)
            if request is None or request.server is not server:
                continue
            server_moves = request.sampled_by_server not in (-1, report.sampled)
            before = () if request.seen is None else request.seen.tokens
            if any(seen.tokens) and seen.tokens != before:
                growth, sampled = request.growth, sum(seen.tokens)
                self.tokens += max(0, sampled - growth.tokens)
                growth.tokens, growth.longest = max(sampled, growth.tokens), max(growth.longest, *seen.tokens)
                growth.moved = growth.grew = now
            elif seen.waits and server_moves:
                request.growth.moved = request.growth.grew = now
            request.seen, request.sampled_by_server = seen, report.sampled
