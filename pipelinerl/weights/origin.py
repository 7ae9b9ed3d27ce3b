"""A trainer rank's end of weight updates: it snapshots its stripe of every version, and servers pull it from here.

The stripes of all ranks make up the model. No rank holds more than its own. Rank 0's `sender` tells the servers who has
which stripe, and asks the other ranks for the descriptions of theirs.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from pipelinerl.config.backends import Carriage
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.delta import encode_delta
from pipelinerl.weights.digest import checksum
from pipelinerl.weights.giver import Giver
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.plan import DeltaMode, TakePlan
from pipelinerl.weights.protocol import Address, Describe, Description, ParamSpec, Take
from pipelinerl.weights.shelf import Shelf
from pipelinerl.weights.snapshot import Snapshot, Snapshots

DESCRIBED = 4
"""Descriptions of so many versions are remembered."""


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """Settings of weight updates."""

    secret: str
    """The run's secret."""
    carriage: Carriage = "tcp"
    bucket_bytes: int = 8 << 20
    timeout_s: float = 120.0
    """A server that has not taken an update within this time leaves service."""
    stall_s: float = 5.0
    """A worker leaves a source that has sent no byte for so long."""
    host: str = "127.0.0.1"
    """The name under which servers reach this process."""
    port: int = 0
    """0 = any free port."""
    device: torch.device | str = "cpu"
    """Where buckets must lie for NCCL and IPC. Snapshots lie in host memory."""
    delta: DeltaMode = False
    """Send only the changes to servers that hold the previous version, if that is smaller. ``auto``: and faster."""
    probe_tolerance: float | None = None
    """`weights.probe_tolerance` for checking that servers use their weights (`attestor`). None = no checks."""


class Origin:
    """Serves one rank's stripe of the newest versions.

    Args:
        settings: settings of weight updates.
        sender: name of the trainer process, equal on all its ranks.
        rank, ranks: this rank, and the number of ranks that send.
    """

    def __init__(self, settings: SenderSettings, *, sender: str, rank: int = 0, ranks: int = 1):
        self.sender, self.ranks = sender, ranks
        self._timeout_s = settings.timeout_s
        self._is_described = settings.delta is not False or settings.probe_tolerance is not None
        device, shelf = _indexed(torch.device(settings.device)), Shelf()
        self.giver = Giver(
            shelf,
            secret=settings.secret,
            host=settings.host,
            port=settings.port,
            device=device,
            on_order=self.describe,
        )
        self._snapshots = Snapshots(sender, shelf, device, rank=rank, ranks=ranks)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-work")
        self._descriptions: dict[int, Future[Description]] = {}
        self._taken = threading.Condition()

    @property
    def address(self) -> Address:
        return self.giver.address

    def take(
        self,
        version: int,
        params: Iterable[tuple[str, torch.Tensor]],
        specs: Sequence[ParamSpec],
        plan: TakePlan,
    ) -> Snapshot:
        """Copies this rank's stripe of a version. Returns when the parameters may change.

        Args:
            version: number of optimizer steps that made these weights.
            params: all full tensors, in the order of ``specs``. They are consumed one by one, so that a sharded trainer
                gathers one at a time.
            specs: every parameter's name, dtype and full shape.
            plan: rank 0's decision for this version.
        """
        snapshot = self._snapshots.take(version, params, Layout(tuple(specs)), plan)
        if self._is_described:
            snapshot.description = self._pool.submit(self._make_description, snapshot)
            with self._taken:
                self._descriptions[version] = snapshot.description
                for old in sorted(self._descriptions)[:-DESCRIBED]:
                    del self._descriptions[old]
                self._taken.notify_all()
        return snapshot

    def describe(self, order: Describe | Take) -> Description:
        """Returns the description of this rank's stripe of a version, which may still be taken or encoded.

        Raises:
            WeightUpdateError: the version was not taken within `weights.timeout_s`, or the order is meant for servers.
        """
        if isinstance(order, Take):
            raise WeightUpdateError("only servers take weights")
        version = order.version
        with self._taken:
            if not self._taken.wait_for(lambda: version in self._descriptions, self._timeout_s):
                raise WeightUpdateError(f"this rank has not taken version {version} within {self._timeout_s:g} s")
            future = self._descriptions[version]
        return future.result(self._timeout_s)

    def close(self) -> None:
        self.giver.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_description(self, snapshot: Snapshot) -> Description:
        started, delta = time.monotonic(), None
        if snapshot.base is not None:
            delta = encode_delta(snapshot.base, snapshot.buffer, torch.get_num_threads())
        snapshot.base, encode_s = None, time.monotonic() - started
        if delta is not None:
            self._snapshots.put_delta(snapshot, delta)
        return Description(
            checksum=checksum(snapshot.buffer, snapshot.first),
            delta_bytes=None if delta is None else delta.numel(),
            encode_s=encode_s,
        )


def _indexed(device: torch.device) -> torch.device:
    """Adds the index to a CUDA device, because communicators compare devices including their index."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
