"""One trainer rank's stripe of the newest versions, from the end of an optimizer step until the last server has it."""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from pipelinerl.weights.layout import Layout, StripeBuffer
from pipelinerl.weights.pinned import pinned
from pipelinerl.weights.protocol import payload_key
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.chain import stripes

STRIPE_UNIT = 128 << 10
"""Bytes. Stripes begin at multiples of this: of the digest's rows and of the delta's chunks."""


def model_stripes(layout: Layout, ranks: int) -> list[tuple[int, int]]:
    """Returns (start, end) of each rank's stripe. The last ranks have none if the model is small."""
    return stripes(layout.num_bytes, ranks, STRIPE_UNIT)


@dataclass(eq=False)
class Snapshot:
    """One rank's stripe of one version."""

    version: int
    stripe: StripeBuffer
    base: torch.Tensor | None = None
    """Delta mode: this stripe of the previous version, until the delta is encoded."""
    base_version: int | None = None
    in_use: list[Future[Any]] = field(default_factory=list)
    """Work that reads the buffer."""

    @property
    def buffer(self) -> torch.Tensor:
        return self.stripe.buffer


class Snapshots:
    """One rank's buffers on the registry from which servers pull: two if servers still pull the newest, or for deltas.

    They lie in host memory, pinned if the trainer's ``device`` is a GPU.
    """

    def __init__(self, sender: str, registry: BufferRegistry, device: torch.device, *, rank: int, ranks: int):
        self._sender, self._registry, self._device = sender, registry, device
        self._rank, self._ranks = rank, ranks
        self._newest: Snapshot | None = None
        self._older: Snapshot | None = None

    def take_snapshot(
        self, version: int, params: Iterable[tuple[str, torch.Tensor]], layout: Layout, plan: SnapshotPlan
    ) -> Snapshot:
        """Copies this rank's stripe and returns when the parameters may change.

        Interrupts servers that pull another version than ``plan.kept``. A base of a delta is kept in any case.
        """
        newest = self._newest
        is_base = plan.is_delta and newest is not None and newest.stripe.layout == layout
        keeps = newest.version if is_base and newest is not None else plan.kept
        held = [snapshot for snapshot in (newest, self._older) if snapshot is not None]
        self._older = next((snapshot for snapshot in held if snapshot.version == keeps), None)
        stripe = self._free([snapshot for snapshot in held if snapshot is not self._older], held, layout)
        stripe.fill(params)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._newest = snapshot = Snapshot(version, stripe)
        if is_base:
            assert newest is not None
            snapshot.base, snapshot.base_version = newest.buffer, newest.version
        self._registry.put(payload_key(self._sender, version, None), stripe.buffer, first=stripe.first)
        return snapshot

    def put_delta(self, snapshot: Snapshot, delta: torch.Tensor) -> None:
        """Puts the encoded difference from the previous version on the registry, at the stripe's place."""
        key = payload_key(self._sender, snapshot.version, snapshot.base_version)
        self._registry.put(key, delta, first=snapshot.stripe.first)

    def _free(self, spares: list[Snapshot], held: list[Snapshot], layout: Layout) -> StripeBuffer:
        """Withdraws ``spares``. Returns the stripe of one of them, or new memory if none has this layout."""
        wait([future for snapshot in held for future in snapshot.in_use])
        for spare in spares:
            for base_version in (None, spare.base_version):
                self._registry.withdraw(payload_key(self._sender, spare.version, base_version))
        fitting = next((spare.stripe for spare in spares if spare.stripe.layout == layout), None)
        if fitting is not None:
            return fitting
        first, end = dict(enumerate(model_stripes(layout, self._ranks))).get(self._rank, (0, 0))
        size, on_gpu = end - first, self._device.type == "cuda"
        buffer = pinned(size) if on_gpu else torch.zeros(size, dtype=torch.uint8)
        return StripeBuffer(layout, buffer, first)
