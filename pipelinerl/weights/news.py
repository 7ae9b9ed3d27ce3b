"""The trainer's messages about its servers: which server serves which version, and which missed a weight probe.

A `WeightUpdateSuccess` holds the complete state, so a listener needs only the newest one and what follows it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipelinerl.errors import ServersExpelledError
from pipelinerl.records import ProbeMissed, ProbePassed, WeightUpdateSuccess
from pipelinerl.weights.attestor import Miss
from pipelinerl.weights.member import Member

Announcement = WeightUpdateSuccess | ProbeMissed | ProbePassed


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


class News:
    """Writes a message when the state has changed. ``write`` may block."""

    def __init__(self, write: Callable[[Announcement], object]):
        self._write = write
        self.serving: dict[str, int] = {}
        """Server → version, as last announced."""
        self._proved: dict[str, int] = {}
        """`WeightUpdateSuccess.proved`, as last announced."""
        self.stats = PushStats()

    def count_live(self, version: int) -> int:
        """Counts the servers that were announced with this version or a newer one."""
        return sum(served >= version for served in tuple(self.serving.values()))

    def missed(self, miss: Miss, members: Sequence[Member]) -> None:
        """Announces a failed probe at once. The new state of the servers follows with ``tell``.

        Raises:
            ServersExpelledError: no server is left.
        """
        self._write(
            ProbeMissed(
                server=miss.server,
                version=miss.version,
                since=miss.since,
                is_final=miss.is_final,
                reason=miss.reason,
                timestamp=time.time(),
            )
        )
        self.serving.pop(miss.server, None)
        if miss.is_final and all(member.is_expelled for member in members):
            raise ServersExpelledError(
                f"no inference server is left: each missed its weight probe twice. The last one was {miss.server}: "
                f"version {miss.version} {miss.reason}. The figures of the others are in this log. If the servers are "
                "healthy, raise weights.probe_tolerance"
            )

    def tell(self, members: Sequence[Member], proved: Mapping[str, int]) -> bool:
        """Announces which server serves and has proved which version. Returns False if nothing has changed.

        Args:
            proved: `Attestor.proved`. Empty = servers are not probed.
        """
        serving = {member.name: member.serves for member in members if member.serves is not None}
        proved = {name: proved[name] for name in serving if name in proved}
        if serving == self.serving:
            return self._tell_proved(proved)
        version = max(serving.values(), default=self.stats.version)
        newest = [member for member in members if member.serves == version]
        outcomes = [member.last for member in newest if member.last is not None]
        pauses = tuple(outcome.answer.pause_ms for outcome in outcomes if outcome.answer is not None)
        message = WeightUpdateSuccess(
            version=version,
            servers=tuple(member.name for member in newest),
            older={name: served for name, served in serving.items() if served != version},
            proved=proved,
            pause_ms=pauses,
            transfer_ms=1e3 * max((outcome.seconds for outcome in outcomes), default=0.0),
            timestamp=time.time(),
        )
        self._write(message)
        self.serving, self._proved = serving, proved
        self.stats = PushStats(
            version=version,
            servers=message.servers,
            pause_ms=sum(pauses) / len(pauses) if pauses else 0.0,
            transfer_ms=message.transfer_ms,
        )
        return True

    def _tell_proved(self, proved: dict[str, int]) -> bool:
        changed = {name: version for name, version in proved.items() if self._proved.get(name) != version}
        if changed:
            self._write(ProbePassed(proved=changed, timestamp=time.time()))
            self._proved = proved
        return bool(changed)
