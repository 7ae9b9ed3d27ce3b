"""A trainer rank's end of weight updates: it copies its stripe of every version, and servers pull it from here.

`Snapshots` has a rank's copies, from the end of an optimizer step until the last server has them. `Origin` serves them.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from pipelinerl.config.backends import TransportName
from pipelinerl.config.sections import WeightsSection
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout, StripeBuffer
from pipelinerl.weights.pinned import pinned
from pipelinerl.weights.protocol import (
    Address,
    Describe,
    Description,
    Failed,
    Order,
    ParamSpec,
    PullUpdate,
    Sum,
    Summed,
    Write,
    Written,
    payload_key,
)
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.store.files import open_files
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.chain import stripes
from pipelinerl.weights.transfer.checksum import Sums, checksum
from pipelinerl.weights.transfer.delta import CHUNK_WORDS, encode_delta
from pipelinerl.weights.transfer.source import SourceServer
from pipelinerl.weights.transfer.wire import view_of

STRIPE_UNIT = 2 * CHUNK_WORDS
"""Bytes. Stripes begin at multiples of this: of the delta's chunks, and so of the checksum's rows."""
DESCRIBED = 4
"""Number of versions whose descriptions are remembered."""


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """Settings of weight updates: those of the configuration, and what else the trainer's ranks need."""

    secret: str
    """The run's secret."""
    weights: WeightsSection
    transport: TransportName = "tcp"
    patience_s: float = 600.0
    """The updates end with an error if every server has refused them for this long."""
    host: str = "127.0.0.1"
    """The name under which servers reach this process."""
    port: int = 0
    """0 = any free port."""
    device: torch.device | str = "cpu"
    """Where buckets must lie for NCCL and IPC. Snapshots lie in host memory."""
    probe_tolerance: float | None = None
    """Noise of a healthy server in nats (`weights.probe_tolerance`, with `auto` decided). None = no checks."""
    base: str | None = None
    """`base_files.base_digest` of the base, where an adapter is sent alone. None = all weights are sent."""
    store: str | None = None
    """Folder or fsspec URL where versions are written. None = servers pull them from the ranks."""

    @property
    def bucket_bytes(self) -> int:
        return int(self.weights.bucket_mb * 2**20)


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


class Origin:
    """Serves one rank's stripe of the newest versions. All ranks have the same ``sender``, the trainer's name."""

    def __init__(self, settings: SenderSettings, *, sender: str, rank: int = 0, ranks: int = 1):
        self.sender, self.ranks = sender, ranks
        self._settings, self._rank = settings, rank
        self._is_described = bool(settings.weights.delta or settings.store) or settings.probe_tolerance is not None
        device, registry = torch.device(settings.device), BufferRegistry()
        if device.type == "cuda" and device.index is None:  # communicators compare devices including their index
            device = torch.device("cuda", torch.cuda.current_device())
        self.source_server = SourceServer(
            registry,
            secret=settings.secret,
            host=settings.host,
            port=settings.port,
            device=device,
            on_order=self.obey,
        )
        self._registry, self._sums = registry, Sums(registry)
        self._snapshots = Snapshots(sender, registry, device, rank=rank, ranks=ranks)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-work")
        self._described: dict[int, tuple[Snapshot, Future[Description]]] = {}
        self._taken = threading.Condition()

    @property
    def address(self) -> Address:
        return self.source_server.address

    def take_snapshot(
        self,
        version: int,
        params: Iterable[tuple[str, torch.Tensor]],
        specs: Sequence[ParamSpec],
        plan: SnapshotPlan,
    ) -> Snapshot:
        """Copies this rank's stripe of a version. Returns when the parameters may change.

        Args:
            version: number of optimizer steps that made these weights.
            params: all full tensors, in the order of ``specs``, consumed one by one, as a sharded trainer gathers them.
            specs: every parameter's name, dtype and full shape.
            plan: rank 0's decision for this version.
        """
        snapshot = self._snapshots.take_snapshot(version, params, Layout(tuple(specs)), plan)
        self.source_server.prefer(payload_key(self.sender, version, None))
        if self._is_described:
            future = self._pool.submit(self._make_description, snapshot)
            snapshot.in_use.append(future)
            with self._taken:
                self._described[version] = (snapshot, future)
                for old in sorted(self._described)[:-DESCRIBED]:
                    del self._described[old]
                self._taken.notify_all()
        return snapshot

    def obey(self, order: Order) -> "Description | Summed | Writing":
        """Follows an order of rank 0, or answers a server's worker."""
        match order:
            case Describe():
                return self.describe(order)
            case Sum():
                return self._sums.answer(order)
            case Write():
                return self.write(order)
            case PullUpdate():
                raise WeightUpdateError("only servers take weights")

    def describe(self, order: Describe) -> Description:
        """Returns the description of this rank's stripe of a version, which may still be taken or encoded.

        Raises:
            WeightUpdateError: the version was not taken within `weights.timeout_s`.
        """
        return self._find(order.version)[1].result(self._settings.weights.timeout_s)

    def write(self, order: Write) -> "Writing":
        """Starts to write this rank's stripe of a version to the store. The stripe stays until that has ended."""
        snapshot, _ = self._find(order.version)
        future = self._pool.submit(self._write, snapshot, order)
        snapshot.in_use.append(future)
        return Writing(future)

    def _find(self, version: int) -> tuple[Snapshot, "Future[Description]"]:
        timeout_s = self._settings.weights.timeout_s
        with self._taken:
            if not self._taken.wait_for(lambda: version in self._described, timeout_s):
                raise WeightUpdateError(f"this rank has not taken version {version} within {timeout_s:g} s")
            return self._described[version]

    def close(self) -> None:
        self.source_server.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_description(self, snapshot: Snapshot) -> Description:
        started, delta = time.monotonic(), None
        if snapshot.base is not None:
            delta = encode_delta(snapshot.base, snapshot.buffer, torch.get_num_threads())
        snapshot.base, encode_s = None, time.monotonic() - started
        if delta is not None:
            self._snapshots.put_delta(snapshot, delta)
        return Description(
            checksum=checksum(snapshot.buffer, snapshot.stripe.first),
            delta_bytes=None if delta is None else delta.numel(),
            encode_s=encode_s,
        )

    def _write(self, snapshot: Snapshot, order: Write) -> Written:
        """Writes a file of this rank. Its name tells generation, version and rank."""
        assert self._settings.store is not None, "the run has no store of weights"
        base_version, kind = (snapshot.base_version, "delta") if order.is_delta else (None, "whole")
        item = self._registry.find(payload_key(self.sender, order.version, base_version))
        if item is None:
            raise WeightUpdateError(f"version {order.version} is no longer here")
        name = f"{order.prefix}-{order.version}-{self._rank}.{kind}"
        return Written(file=open_files(self._settings.store).put(name, view_of(item.buffer)))


class Writing:
    """A file that is being written."""

    def __init__(self, future: "Future[Written]"):
        self._future = future

    def reply(self, timeout_s: float) -> Written | Failed | None:
        """Returns the result, or None if the file is still being written after ``timeout_s``."""
        wait([self._future], timeout_s)
        if not self._future.done():
            return None
        error = self._future.exception()
        return self._future.result() if error is None else Failed(error=str(error))

    def abandon(self) -> None:
        """Does nothing: a file that nobody waits for is removed later."""
