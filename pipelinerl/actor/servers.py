"""One worker's view of the servers in service: the load of each, and which of them failed recently."""

import asyncio
import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

COOL_DOWN_S = 2.0
"""For this long after a failure, a server is chosen only if no other is available."""


@dataclass(eq=False)
class InferenceServer:
    """A server, the load that this worker puts on it, and its unanswered requests."""

    name: str
    url: str
    capacity: int = 1
    """Rollouts at a time that it takes, relative to the other servers."""
    load: int = 0
    """Rollouts of this worker's groups that use it."""
    cool_until: float = 0.0
    in_service: bool = True
    is_draining: bool = False
    """It finishes its current requests and gets no new one."""
    probes_missed: int = 0
    """Weight probes that it had missed when it entered service. A server that returns to service gets a new object."""
    version: int = 0
    """Version that it serves, as far as this worker knows."""
    requests: set[asyncio.Task] = field(default_factory=set)

    @property
    def takes_requests(self) -> bool:
        return self.in_service and not self.is_draining

    def assign(self, rollouts: int) -> None:
        """Counts rollouts that use the server from now on."""
        self.load += rollouts

    def release(self, rollouts: int) -> None:
        """Counts rollouts that use it no longer."""
        self.load -= rollouts

    def cool_down(self) -> None:
        """Notes a failure, so that other servers are preferred for ``COOL_DOWN_S``."""
        self.cool_until = time.monotonic() + COOL_DOWN_S


class ServerLoads:
    """The servers in service, with load and recent failures. Sends no requests itself."""

    def __init__(self) -> None:
        self._servers: dict[str, InferenceServer] = {}
        self._changed = asyncio.Event()

    def update(
        self,
        urls: Mapping[str, str],
        serving: Mapping[str, int],
        probes_missed: Mapping[str, int] | None = None,
        draining: Collection[str] = (),
        capacities: Mapping[str, int] | None = None,
    ) -> None:
        """Sets the servers in service. Requests on a server that left are cancelled, and the group repeats them.

        Args:
            urls: name → URL of the servers in service.
            serving: name → version that the server serves.
            probes_missed: name → weight probes that the server has missed. A server that missed another one has left.
            draining: names of servers in service that accept no new request.
            capacities: name → rollouts at a time that the server takes. Not used unless it is known of all.
        """
        missed = probes_missed or {}
        for name, server in tuple(self._servers.items()):
            if urls.get(name) == server.url and missed.get(name, 0) == server.probes_missed:
                continue
            del self._servers[name]
            server.in_service = False
            for request in server.requests:
                request.cancel()
        known = capacities if capacities and capacities.keys() >= urls.keys() else {}
        for name, url in urls.items():
            if name not in self._servers:
                self._servers[name] = InferenceServer(name, url, probes_missed=missed.get(name, 0))
            self._servers[name].is_draining = name in draining
            self._servers[name].version = serving[name]
            self._servers[name].capacity = known.get(name, 1)
        self._changed.set()

    async def choose(self, oldest: int) -> InferenceServer:
        """Waits for servers of version ``oldest`` or newer. Returns the one with the least load for its capacity."""
        while not (candidates := [s for s in self._servers.values() if s.takes_requests and s.version >= oldest]):
            self._changed.clear()
            await self._changed.wait()
        now = time.monotonic()
        return min(
            candidates, key=lambda server: (server.cool_until > now, server.load / server.capacity, random.random())
        )
