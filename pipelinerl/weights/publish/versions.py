"""The versions on their way to the servers: how the next one is taken, and the one that is offered now."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import Address, Description
from pipelinerl.weights.publish.servers import ServerClient
from pipelinerl.weights.transfer import chain

RETRY = 64
"""Versions between two measurements of the slower way."""
WARM_UPS = 1
"""The first whole update also connects and allocates, so it is not measured."""

DeltaMode = Literal["auto"] | bool


@dataclass(frozen=True, kw_only=True)
class SnapshotPlan:
    """Decided by rank 0 for all ranks."""

    kept: int | None = None
    """A version that servers still pull. None = there is none."""
    is_delta: bool = False
    """Encode the difference from the version before."""


class DeltaChoice:
    """Decides which versions are encoded. ``auto`` takes the way that was faster when it was last measured."""

    def __init__(self, mode: DeltaMode):
        self._mode = mode
        self._count = 0
        self._whole_s: float | None = None
        self._delta_s: float | None = None
        self._version: int | None = None
        """The version that was measured last."""

    def next(self) -> bool:
        """Whether the next version is encoded."""
        if self._mode != "auto":
            return self._mode is True
        self._count += 1
        if self._whole_s is None or self._delta_s is None:
            return self._whole_s is not None
        is_faster = self._delta_s < self._whole_s
        return is_faster != (self._count % RETRY == 0)

    def measured(self, version: int, seconds: float, *, is_delta: bool) -> None:
        """Records how long the first server waited for a version, with its encoding. Others may be slow or late."""
        if self._version is not None and version <= self._version:
            return
        self._version = version
        if is_delta:
            self._delta_s = seconds
        elif self._count > WARM_UPS:
            self._whole_s = seconds


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """An update of one server."""

    client: ServerClient
    route: chain.Route
    num_bytes: int
    """Length of the payload."""
    bucket_bytes: int
    base_version: int | None = None
    """The payload is the difference from this version. None = the whole version."""
    is_chained: bool = True
    """The server gets the version together with others. False = later, from those that have it."""

    @property
    def givers(self) -> frozenset[Address]:
        """The first source of each worker outside its own server."""
        own = set(self.client.workers)
        return frozenset(
            next(source for source in one.sources if source not in own) for worker in self.route for one in worker
        )


@dataclass(eq=False)
class PendingVersion:
    """A version and the servers that were ready when it arrived. Its bytes must not change while the offer is open.

    The offer closes ``stall_s`` after the first server has the version, so it does not wait for slow servers.
    """

    version: int
    layout: Layout
    stripes: tuple[tuple[int, int], ...]
    """(start, end) of each sending rank's share of the version."""
    base_version: int | None = None
    """Delta mode: the previous version."""
    deltas: tuple[tuple[int, int], ...] | None = None
    """The encoded differences from it. Each lies at the start of its stripe. None = there are none, or not yet."""
    encode_s: float = 0.0
    """Seconds that the servers waited for the deltas."""
    descriptions: "Future[list[Description]] | None" = None
    """What the ranks say about their stripes. None = it is not needed."""
    pulls: dict[str, Dispatch] = field(default_factory=dict)
    """The updates under way, by server."""
    took_delta: set[str] = field(default_factory=set)
    """Servers that took it as a difference, and can pass that on."""
    update: int = 0
    """`links.LinkTable.update` in which it was offered."""
    _pending: set[str] | None = None
    """None until the version has been offered to the servers."""
    _offered: float = 0.0
    _first: float | None = None

    def add_deltas(self, described: Sequence[Description]) -> None:
        """Records the deltas of all stripes. If one of them has none, the whole version is sent."""
        self.encode_s = max((description.encode_s for description in described), default=0.0)
        lengths = [description.delta_bytes for description in described if description.delta_bytes is not None]
        if len(lengths) == len(self.stripes):
            self.deltas = tuple((start, start + size) for (start, _), size in zip(self.stripes, lengths, strict=True))

    def ranges(self, base_version: int | None) -> tuple[tuple[int, int], ...]:
        """Returns where each rank's bytes lie, of the whole version or of its difference from ``base_version``."""
        if base_version is None:
            return self.stripes
        assert self.deltas is not None
        assert self.base_version == base_version
        return self.deltas

    @property
    def is_new(self) -> bool:
        return self._pending is None

    def start(self, names: Iterable[str], update: int = 0) -> None:
        self._pending, self._offered, self.update = set(names), time.monotonic(), update

    @property
    def offered_s(self) -> float:
        """Seconds since it was offered."""
        return time.monotonic() - self._offered

    def reopen(self) -> None:
        """Makes the offer a new one, because its version must be delivered again."""
        self._pending = self._first = None

    def end(self, name: str, *, is_served: bool) -> None:
        """Records that a server has the version (``is_served``) or will not get it."""
        self.pulls.pop(name, None)
        if self._pending is not None:
            self._pending.discard(name)
        if is_served and self._first is None:
            self._first = time.monotonic()

    def is_open(self, stall_s: float) -> bool:
        is_late = self._first is not None and time.monotonic() - self._first > stall_s
        return self._pending is None or (bool(self._pending) and not is_late)
