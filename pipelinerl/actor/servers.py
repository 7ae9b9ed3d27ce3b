"""The servers in service as one worker sees them: how loaded each is, and which failed just now."""

import asyncio
import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

COOL_DOWN_S = 2.0
"""A server that failed is chosen only after all others for this long."""


@dataclass(eq=False)
class InferenceServer:
    """A server, its load from this worker, and its requests under way."""

    name: str
    url: str
    load: int = 0
    """Rollouts of the groups that use it."""
    cool_until: float = 0.0
    in_service: bool = True
    is_draining: bool = False
    """Its requests under way end, and no new one is sent."""
    missed_since: int | None = None
    """First version that it may not have used, once it missed a weight probe. One that comes back is another object."""
    version: int = 0
    """That it serves, as far as is known."""
    requests: set[asyncio.Task] = field(default_factory=set)

    @property
    def takes_requests(self) -> bool:
        return self.in_service and not self.is_draining

    def cool_down(self) -> None:
        """The server failed: others are chosen for a while."""
        self.cool_until = time.monotonic() + COOL_DOWN_S


class ServerPool:
    """The servers in service. Knows load and recent failures; never talks to them."""

    def __init__(self) -> None:
        self._servers: dict[str, InferenceServer] = {}
        self._left: dict[str, InferenceServer] = {}
        """The newest of each name that left: a missed probe may be told after it is out of service."""
        self._changed = asyncio.Event()

    def update(
        self,
        urls: Mapping[str, str],
        serving: Mapping[str, int],
        missed: Mapping[str, int] | None = None,
        draining: Collection[str] = (),
    ) -> None:
        """Takes the servers now in service; requests on a server that left are cancelled, to be repeated elsewhere.

        Args:
            serving: server → the version that it serves.
            draining: names of servers in service that take no new request.
            missed: servers that left because of their weight probe → the first version that they may not have used.
        """
        for name in [name for name, server in self._servers.items() if urls.get(name) != server.url]:
            server = self._servers.pop(name)
            server.in_service = False
            self._left[name] = server
            for request in server.requests:
                request.cancel()
        for name, since in (missed or {}).items():
            if name in self._left and name not in urls:
                self._left[name].missed_since = since
        for name, url in urls.items():
            if name not in self._servers:
                self._servers[name] = InferenceServer(name, url)
            self._servers[name].is_draining = name in draining
            self._servers[name].version = serving[name]
        self._changed.set()

    async def choose(self, oldest: int) -> InferenceServer:
        """The least loaded server that did not fail just now; waits while none serves version ``oldest`` or a newer."""
        while not (candidates := [s for s in self._servers.values() if s.takes_requests and s.version >= oldest]):
            self._changed.clear()
            await self._changed.wait()
        now = time.monotonic()
        return min(candidates, key=lambda server: (server.cool_until > now, server.load, random.random()))
