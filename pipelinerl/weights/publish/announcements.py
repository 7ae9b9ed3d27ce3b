"""The trainer's messages about its servers: which server serves which version, and which missed a weight probe.

A `WeightUpdateSuccess` holds the complete state, so a listener needs only the newest one and what follows it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipelinerl.errors import ServersExpelledError
from pipelinerl.records import CalibrationExceeded, ProbeMissed, ProbePassed, WeightUpdateSuccess
from pipelinerl.weights.publish.servers import ServerClient

Announcement = WeightUpdateSuccess | ProbeMissed | CalibrationExceeded | ProbePassed


@dataclass(frozen=True, kw_only=True)
class PushStats:
    """The live version and the cost of its update."""

    version: int = -1
    """Newest version that a server serves."""
    servers: tuple[str, ...] = ()
    """Servers that serve it."""
    pause_ms: float = 0.0
    """Mean over these servers."""
    transfer_ms: float = 0.0
    """Time from the update's start until the slowest of them served it."""
    failed_groups: Mapping[str, int] = field(default_factory=dict)
    """NCCL groups that failed, by the interface through which their bytes came over TCP instead."""
    noise: float | None = None
    """Nats: `WeightChecker.noise`. None: no server is probed."""


class Announcements:
    """Writes a message when the state has changed. ``write`` may block."""

    def __init__(self, write: Callable[[Announcement], object]):
        self._write = write
        self.serving: dict[str, int] = {}
        """Server → version, as last announced."""
        self._verified: dict[str, int] = {}
        """`WeightUpdateSuccess.proved`, as last announced."""
        self.stats = PushStats()

    def count_live(self, version: int) -> int:
        """Counts the servers that were announced with this version or a newer one."""
        return sum(served >= version for served in tuple(self.serving.values()))

    def missed(self, miss: ProbeMissed, clients: Sequence[ServerClient]) -> None:
        """Announces a failed probe at once. The new state of the servers follows with ``announce``.

        Raises:
            ServersExpelledError: no server is left.
        """
        self._write(miss)
        self.serving.pop(miss.server, None)
        if miss.is_final and all(client.is_expelled for client in clients):
            raise ServersExpelledError(
                f"no inference server is left: each missed its weight probe twice. The last one was {miss.server}: "
                f"version {miss.version} {miss.reason}. The figures of the others are in this log. If the servers are "
                "healthy, raise weights.probe_tolerance"
            )

    def exceeded(self, message: CalibrationExceeded) -> None:
        """Announces a server that differs too much from the trainer at version 0."""
        self._write(message)

    def announce(self, clients: Sequence[ServerClient], verified: Mapping[str, int]) -> bool:
        """Announces which server serves and has been verified with which version. Returns False if nothing has changed.

        Args:
            verified: `WeightChecker.verified`. Empty = servers are not probed.
        """
        serving = {client.name: client.serves for client in clients if client.serves is not None}
        verified = {name: verified[name] for name in serving if name in verified}
        if serving == self.serving:
            return self._announce_verified(verified)
        version = max(serving.values(), default=self.stats.version)
        newest = [client for client in clients if client.serves == version]
        outcomes = [client.last for client in newest if client.last is not None]
        pauses = tuple(outcome.answer.pause_ms for outcome in outcomes if outcome.answer is not None)
        message = WeightUpdateSuccess(
            version=version,
            servers=tuple(client.name for client in newest),
            older={name: served for name, served in serving.items() if served != version},
            proved=verified,
            pause_ms=pauses,
            transfer_ms=1e3 * max((outcome.seconds for outcome in outcomes), default=0.0),
            timestamp=time.time(),
        )
        self._write(message)
        self.stats = PushStats(
            version=version,
            servers=message.servers,
            pause_ms=sum(pauses) / len(pauses) if pauses else 0.0,
            transfer_ms=message.transfer_ms,
        )
        self.serving, self._verified = serving, verified  # last: another thread waits for it and then reads `stats`
        return True

    def _announce_verified(self, verified: dict[str, int]) -> bool:
        changed = {name: version for name, version in verified.items() if self._verified.get(name) != version}
        if changed:
            self._write(ProbePassed(proved=changed, timestamp=time.time()))
            self._verified = verified
        return bool(changed)
