"""Decides which finished rollouts may be published, by the weight probes of the servers that sampled them. No I/O.

A server's version is unverified until its probe is over (``WeightUpdateSuccess.proved``). Nobody waits longer than
``CHECK_WAIT_S``, and not at all for a server whose newest probe took longer.
"""

from collections.abc import Iterable, Mapping

from pipelinerl.actor.messages import Failure
from pipelinerl.records import Rollout
from pipelinerl.records.drops import DropReason

CHECK_WAIT_S = 10.0
"""Longest wait of a finished group for the probes of its servers."""
REMEMBERED = 1 << 10
"""Pairs of servers and version whose published rollouts are counted when a server misses its probe, the newest ones."""


def newest_version(rollout: Rollout) -> int:
    """Returns the newest weight version that sampled the rollout, -1 without a sampled token."""
    return max((int(sequence.spans[:, 2].max(initial=-1)) for sequence in rollout.sequences), default=-1)


def newest_used(rollouts: Iterable[Rollout]) -> dict[str, int]:
    """Returns the newest version in the rollouts of each server that answered them."""
    used: dict[str, int] = {}
    for rollout in rollouts:
        newest = newest_version(rollout)
        used |= {server: max(newest, used.get(server, -1)) for server in rollout.servers}
    return used


class Misses:
    """The weight probes that servers have missed. The rollouts that each of them concerns are refused.

    A rollout names the probes that its servers had missed before they answered, so those that a server makes after it
    was sent the weights again are not refused.
    """

    def __init__(self) -> None:
        self._since: dict[str, list[int]] = {}
        """Server → first version that may be wrong, of each probe that it missed."""

    def add(self, server: str, since: int) -> None:
        """Counts a missed probe. ``since``: the first version that no probe of the server confirmed."""
        self._since.setdefault(server, []).append(since)

    @property
    def counts(self) -> dict[str, int]:
        """Server → probes that it has missed."""
        return {server: len(since) for server, since in self._since.items()}

    def faulty_server(self, rollout: Rollout) -> str | None:
        """Returns a server that missed a probe for the rollout's tokens. None: the rollout may be used."""
        if not self._since:
            return None
        newest = newest_version(rollout)
        for server, before in zip(rollout.servers, rollout.probes_missed, strict=False):
            if any(newest >= since for since in self._since.get(server, [])[before:]):
                return server
        return None

    def sort(self, rollouts: Iterable[Rollout]) -> tuple[list[Rollout], list[Failure]]:
        """Returns the rollouts that may be used, and the others as failures."""
        kept, refused = [], []
        for rollout in rollouts:
            server = self.faulty_server(rollout)
            if server is None:
                kept.append(rollout)
                continue
            since = min(self._since[server])
            detail = f"{server} missed its weight probe: what it sampled from version {since} on is not used"
            refused.append(
                Failure(
                    attempt=rollout.attempt,
                    reason=DropReason.WEIGHTS,
                    detail=detail,
                    latency_s=rollout.latency_s,
                    server=server,
                )
            )
        return kept, refused


class PublishGate:
    """The versions with which servers were verified, and which groups wait for a check. Times are monotonic seconds.

    Example:
        >>> gate = PublishGate()
        >>> gate.follow(serving={"s": 8}, verified={"s": 7}, now=0.0)
        >>> gate.holds({"s": 8}, finished=0.0, now=0.1), gate.holds({"s": 7}, finished=0.0, now=0.1)
        (True, False)
    """

    def __init__(self, wait_s: float | None = None):
        self._wait_s = CHECK_WAIT_S if wait_s is None else wait_s
        self._verified: Mapping[str, int] = {}
        self._unverified_at: dict[str, tuple[int, float]] = {}
        """Server with an unverified version → its verified version, and since when that is all."""
        self._slow: set[str] = set()
        """Servers whose newest probe took longer than ``wait_s``."""
        self._published: dict[tuple[tuple[str, ...], int], int] = {}
        """Servers and newest version of rollouts that were published → their number. The newest pair is the last."""

    def follow(self, *, serving: Mapping[str, int], verified: Mapping[str, int], now: float) -> None:
        """Adopts the trainer's newest word: the version that each server serves, and its verified one."""
        self._verified = verified
        for server in self._unverified_at.keys() - verified.keys():
            del self._unverified_at[server]
        for server, version in verified.items():
            before, began = self._unverified_at.get(server, (version, now))
            is_late = now - began > self._wait_s
            if is_late:
                self._slow.add(server)
            elif before < version:
                self._slow.discard(server)
            if version >= serving.get(server, version):
                self._unverified_at.pop(server, None)
            elif before < version or server not in self._unverified_at:
                self._unverified_at[server] = version, now

    def holds(self, used: Mapping[str, int], *, finished: float, now: float) -> bool:
        """Whether a group waits.

        Args:
            used: newest version of each server in its rollouts.
            finished: when its last rollout ended.
        """
        return now - finished < self._wait_s and any(
            version > self._verified[server]
            for server, version in used.items()
            if server in self._verified and server not in self._slow
        )

    def published(self, rollouts: Iterable[Rollout]) -> None:
        """Remembers rollouts that cannot be refused any more."""
        for rollout in rollouts:
            pair = rollout.servers, newest_version(rollout)
            self._published[pair] = self._published.pop(pair, 0) + 1
        while len(self._published) > REMEMBERED:
            del self._published[next(iter(self._published))]

    def count_published(self, server: str, since: int) -> int:
        """Counts the published rollouts that a missed probe concerns, and forgets them."""
        concerned = [pair for pair in self._published if server in pair[0] and pair[1] >= since]
        return sum(self._published.pop(pair) for pair in concerned)
