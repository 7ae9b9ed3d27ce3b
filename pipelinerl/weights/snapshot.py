"""The bytes of one version at the trainer, from the end of an optimizer step until the last server has pulled them.

One buffer is enough while every server keeps up. A second one is made if servers still pull the newest version when the
next one is due, or for deltas, whose base is the previous version.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import payload_key
from pipelinerl.weights.shelf import Shelf


@dataclass(eq=False)
class Snapshot:
    """One version."""

    version: int
    layout: Layout
    buffer: torch.Tensor
    base: torch.Tensor | None = None
    """Delta mode: the previous version's bytes, until the delta is encoded."""
    base_version: int | None = None
    delta: torch.Tensor | None = None
    checksum: "Future[str] | None" = None
    users: set[str] = field(default_factory=set)
    """Servers that pull it."""
    offer: "Offer" = field(default_factory=lambda: Offer())

    def payload(self, base_version: int | None) -> torch.Tensor:
        """Returns the bytes to send: the whole version, or its difference from ``base_version``."""
        if base_version is None:
            return self.buffer
        assert self.delta is not None
        assert self.base_version == base_version
        return self.delta


class Offer:
    """The servers that were ready when a version arrived. The version's bytes must not change while the offer is open.

    The offer closes ``stall_s`` after the first server has the version, so it does not wait for slow servers.
    """

    def __init__(self) -> None:
        self._pending: set[str] | None = None
        """None until the version has been offered to the servers."""
        self._first: float | None = None

    @property
    def is_new(self) -> bool:
        return self._pending is None

    def start(self, names: Iterable[str]) -> None:
        self._pending = set(names)

    def end(self, name: str, *, is_served: bool) -> None:
        """Records that a server has the version (``is_served``) or will not get it."""
        if self._pending is not None:
            self._pending.discard(name)
        if is_served and self._first is None:
            self._first = time.monotonic()

    def is_open(self, stall_s: float) -> bool:
        return self._pending is None or (bool(self._pending) and not self.is_late(stall_s))

    def is_late(self, stall_s: float) -> bool:
        """Whether a server that ends now is more than ``stall_s`` later than the first."""
        return self._first is not None and time.monotonic() - self._first > stall_s


class Snapshots:
    """The trainer's buffers on the shelf from which servers pull. The training thread takes, the sender releases."""

    def __init__(self, sender: str, shelf: Shelf, device: torch.device, *, delta: bool):
        self.sender = sender
        self._shelf, self._device, self._delta = shelf, device, delta
        self.newest: Snapshot | None = None
        self.older: Snapshot | None = None
        """The previous version, while servers pull it or a delta needs it as base."""

    def take(self, version: int, params: Iterable[tuple[str, torch.Tensor]], layout: Layout) -> Snapshot:
        """Copies the parameters and returns when they may change. Interrupts servers that pull the oldest bytes."""
        newest, older = self.newest, self.older
        is_base = self._delta and newest is not None and newest.layout == layout
        if newest is not None and (is_base or newest.users):
            spare, self.older = older, newest
        else:
            spare, self.older = newest, older if older is not None and older.users else None
        buffer = self._reuse(spare, layout)
        layout.fill(buffer, params)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        snapshot = Snapshot(version, layout, buffer)
        if is_base:
            assert newest is not None
            snapshot.base, snapshot.base_version = newest.buffer, newest.version
        self._shelf.put(payload_key(self.sender, version, None), buffer)
        self.newest = snapshot
        return snapshot

    def offer_delta(self, snapshot: Snapshot, delta: torch.Tensor | None) -> None:
        """Puts the encoded difference from the previous version on the shelf. None = the whole version is smaller."""
        snapshot.delta, snapshot.base = delta, None
        if delta is not None:
            self._shelf.put(payload_key(self.sender, snapshot.version, snapshot.base_version), delta)

    def _reuse(self, spare: Snapshot | None, layout: Layout) -> torch.Tensor:
        if spare is not None:
            self._withdraw(spare)
            if spare.checksum is not None:
                spare.checksum.result()  # it reads the buffer
            if spare.buffer.numel() == layout.num_bytes:
                return spare.buffer
        return torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _withdraw(self, snapshot: Snapshot) -> None:
        for base_version in (None, snapshot.base_version):
            self._shelf.withdraw(payload_key(self.sender, snapshot.version, base_version))
        snapshot.delta = None
