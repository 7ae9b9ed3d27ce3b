"""One worker's end of an update: receives all bytes into a staging buffer in the background and forwards them.

A transfer starts to write only after the threads of the one that it supersedes have ended.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import msgspec
import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import (
    STALE,
    Address,
    Failed,
    Link,
    Order,
    PayloadRange,
    PullUpdate,
    Staged,
    Sum,
    Summed,
    WeightUpdateRequest,
)
from pipelinerl.weights.transfer.bucket import CPU
from pipelinerl.weights.transfer.buffers import BufferRegistry, Range
from pipelinerl.weights.transfer.checksum import checksum
from pipelinerl.weights.transfer.delta import apply_delta
from pipelinerl.weights.transfer.puller import Puller
from pipelinerl.weights.transfer.shard import Shard
from pipelinerl.weights.transfer.source import SourceServer
from pipelinerl.weights.transfer.wire import Connection, WireError

log = logging.getLogger(__name__)

_sums = msgspec.json.Decoder(Summed)


@dataclass(eq=False)
class Transfer:
    """One update of one worker in progress."""

    request: WeightUpdateRequest
    layout: Layout
    ranges: tuple[PayloadRange, ...]
    pullers: list[Puller]
    previous: threading.Thread | None
    """The thread of the update that this one supersedes."""
    thread: threading.Thread | None = None
    stopped: str = ""
    """Reason why the transfer was stopped."""
    end: Staged | Failed | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    deadline: float = math.inf
    links: list[Link] = field(default_factory=list)
    """What the pullers saw of their sources."""

    def reply(self, timeout_s: float) -> Staged | Failed | None:
        """Returns the result, or None if the transfer is still running after ``timeout_s``."""
        self.ended.wait(timeout_s)
        return self.end

    def stop(self, reason: str) -> None:
        """Stops the transfer. Any thread may call it."""
        if not self.stopped:
            self.stopped = reason
        for puller in self.pullers:
            puller.interrupt()

    def abandon(self) -> None:
        """Stops the transfer, because its caller no longer waits for it."""
        if self.end is None:
            self.stop("abandoned")

    def close(self, end: Staged | Failed) -> None:
        self.end = end
        self.ended.set()

    def check(self, doing: str = "") -> None:
        """Raises ``WeightUpdateError`` if the transfer must end. ``doing`` explains a timeout."""
        if self.stopped:
            raise WeightUpdateError(self.stopped)
        if time.monotonic() > self.deadline:
            raise WeightUpdateError(f"not all bytes came within {self.request.timeout_s:g} s ({doing})")


class Staging:
    """The bytes of the newest complete version, guarded against change while they are read."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]):
        self._allocate = allocate
        self._buffer: torch.Tensor | None = None
        self._held: tuple[Layout, str] | None = None
        """Layout and key of the bytes. None while they are being replaced."""
        self._reading = threading.Lock()

    @property
    def key(self) -> str | None:
        return self._held[1] if self._held is not None else None

    @contextmanager
    def reading(self, version: int) -> Iterator[tuple[Layout, torch.Tensor] | None]:
        """Yields the bytes of ``version`` and keeps them unchanged meanwhile. Yields None if they are not there."""
        with self._reading:
            held = self._held
            if held is None or self._buffer is None or held[1].rpartition("/")[2] != str(version):
                yield None
            else:
                yield held[0], self._buffer

    def replace(self, num_bytes: int) -> torch.Tensor:
        """Returns a buffer of this size that no one reads, the existing one if its size fits."""
        with self._reading:
            self._held = None
        if self._buffer is None or self._buffer.numel() != num_bytes:
            self._buffer = None
            self._buffer = self._allocate(num_bytes)
        return self._buffer

    def holds(self, layout: Layout, key: str) -> bool:
        return self._held == (layout, key)

    def keep(self, layout: Layout, key: str) -> None:
        """Records which bytes the buffer now holds."""
        self._held = (layout, key)


class Receiver:
    """Receives updates for one worker, and gives them to others.

    Args:
        index: this worker's index in its server (0 …).
        host: the name under which other workers reach this one.
        allocate: makes a flat uint8 staging buffer of a number of bytes, on the device where the swap reads it.
        prepare: called in the background thread with the layout and the staged bytes, before the pause.
        learn: called in the background thread with the layout and the first byte of each stripe, before bytes come.
            Returns the shard that this worker keeps. None = the whole version.
        pace, receive_pace: called with the number of bytes, before sending and after receiving. Benchmarks limit links.
    """

    def __init__(
        self,
        *,
        index: int,
        host: str,
        secret: str,
        device: torch.device,
        allocate: Callable[[int], torch.Tensor],
        prepare: Callable[[Layout, torch.Tensor], None],
        learn: Callable[[Layout, Sequence[int]], Shard | None] = lambda layout, starts: None,
        pace: Callable[[int], None] | None = None,
        receive_pace: Callable[[int], None] | None = None,
    ):
        self._index, self._device, self._secret = index, device, secret
        self._prepare, self._learn = prepare, learn
        self._registry = BufferRegistry()
        self.source_server = SourceServer(
            self._registry, secret=secret, host=host, device=device, on_order=self._obey, pace=pace
        )
        self._make_puller = partial(
            Puller,
            self._registry,
            secret=secret,
            device=device,
            groups=self.source_server.groups,
            pace=receive_pace,
        )
        self._pullers: list[Puller] = []
        self.staging = Staging(allocate)
        self._transfer: Transfer | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> Address:
        return self.source_server.address

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None, "no transfer was started"
        return self._transfer

    def staged(self, version: int) -> tuple[Layout, torch.Tensor]:
        """Returns layout and bytes of a completed transfer."""
        assert isinstance(self.transfer.end, Staged), "nothing is staged"
        assert self.transfer.request.version == version, "another transfer came between"
        with self.staging.reading(version) as staged:
            assert staged is not None
            return staged

    def begin(self, request: WeightUpdateRequest) -> Transfer:
        """Starts receiving and returns at once.

        Raises:
            WeightUpdateError: the delta's base version is not here, or the request does not fit this worker.
        """
        layout = Layout(request.params)
        if self._index >= len(request.workers):
            raise WeightUpdateError(f"the update has ranges for {len(request.workers)} workers, this is {self._index}")
        ranges = request.workers[self._index]
        _check_cover(ranges, layout.num_bytes, is_delta=request.base_version is not None)
        with self._lock:
            self._check_base(request, layout)  # before the transfer under way is stopped for this one
            if self._transfer is not None and self._transfer.end is None:
                self._transfer.stop("superseded by a newer update")
            previous = self._transfer.thread if self._transfer is not None else None
            while len(self._pullers) < len(ranges):
                self._pullers.append(self._make_puller())
            transfer = Transfer(request, layout, ranges, self._pullers[: len(ranges)], previous)
            transfer.thread = threading.Thread(target=self._run, args=(transfer,), name="weight-receiver", daemon=True)
            transfer.thread.start()  # which may fail: a transfer without a thread would never end
            self._transfer = transfer
        return transfer

    def is_sent(self, version: int, shard: Shard) -> bool | None:
        """Whether the trainer's ranks have the same bytes of this shard. None = either side has freed them."""
        transfer = self.transfer
        with self.staging.reading(version) as staged:
            if staged is None or transfer.request.version != version:
                return None
            own = {start: checksum(staged[1][slice(*shard.place(start))]) for start in shard.stripes}
        for one in transfer.ranges:
            question = Sum(key=transfer.request.whole_key, runs=shard.stripes[one.start])
            try:
                with closing(Connection.dial(one.sources[-1], self._secret, transfer.request.timeout_s)) as connection:
                    sent = connection.ask(question, _sums).checksum
            except WireError as error:
                log.warning("event=shard_not_compared version=%d error=%s", version, error)
                return None
            if sent != own[one.start]:
                return None if not sent else False
        return True

    def _obey(self, order: Order) -> Transfer:
        if not isinstance(order, PullUpdate):
            raise WeightUpdateError("only trainer ranks describe and write versions")
        return self.begin(order.request)

    def close(self) -> None:
        """Ends the current transfer and all connections."""
        if self._transfer is not None:
            self._transfer.abandon()
            if self._transfer.thread is not None:
                self._transfer.thread.join()
        self.source_server.close()
        for puller in self._pullers:
            puller.close()

    def _check_base(self, request: WeightUpdateRequest, layout: Layout) -> None:
        if request.base_version is None:
            return
        if not self.staging.holds(layout, f"{request.sender}/{request.base_version}"):
            raise WeightUpdateError(
                f"{STALE} base: the delta is against {request.base_version}, held is {self.staging.key}"
            )

    def _run(self, transfer: Transfer) -> None:
        """Produces a staged buffer. Ends at the last byte, at an error, at the deadline, or when superseded."""
        started = time.monotonic()
        if transfer.previous is not None:
            transfer.previous.join()
            transfer.previous = None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread's is GPU 0
            transfer.deadline = started + transfer.request.timeout_s
            buffer = self._receive(transfer)
            received = time.monotonic()
            if transfer.request.is_last:
                self._prepare(transfer.layout, buffer)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the swap reads the buffer on another stream
            transfer.check()
        except Exception as error:  # noqa: BLE001 — the thread's boundary: the error becomes the transfer's
            log.warning("event=weight_transfer_failed version=%d error=%s", transfer.request.version, error)
            transfer.close(Failed(error=f"{type(error).__name__}: {error}", links=tuple(transfer.links)))
            return
        transfer_ms, prepare_ms = 1e3 * (received - started), 1e3 * (time.monotonic() - received)
        transfer.close(
            Staged(
                transfer_ms=transfer_ms,
                prepare_ms=prepare_ms,
                staged_bytes=buffer.numel(),
                links=tuple(transfer.links),
            )
        )

    def _receive(self, transfer: Transfer) -> torch.Tensor:
        """Receives what this worker keeps of the version, and puts it on the registry."""
        request, layout = transfer.request, transfer.layout
        transfer.check()
        starts = sorted({one.start for one in transfer.ranges})
        shard = None if request.store else self._learn(layout, starts)
        num_bytes = layout.num_bytes if shard is None else shard.num_bytes
        if request.base_version is None:
            self._registry.keep_only()
            buffer = self.staging.replace(num_bytes)
            self._pull(transfer, buffer, shard)
        else:
            self._check_base(request, layout)  # the transfer before may have begun to replace it
            self._registry.keep_only(f"{request.sender}/{request.base_version}")
            payload = torch.empty(max(one.end for one in transfer.ranges), dtype=torch.uint8, device=CPU)
            self._pull(transfer, payload)
            self._registry.keep_only(request.payload_key)
            buffer = self.staging.replace(num_bytes)
            ends = {one.start: one.end for one in transfer.ranges}
            for start, stripe_end in pairwise([*starts, layout.num_bytes]):
                if shard is None:
                    apply_delta(buffer[start:stripe_end], payload[start : ends[start]])
                else:
                    shard.apply_delta(buffer, payload[start : ends[start]], start, stripe_end)
            self._registry.put(request.whole_key, buffer, shard="" if shard is None else shard.name)
        self.staging.keep(layout, request.whole_key)
        return buffer

    def _pull(self, transfer: Transfer, buffer: torch.Tensor, shard: Shard | None = None) -> None:
        """Pulls all ranges in parallel. Workers that pull from here receive the bytes as they arrive."""
        request, ranges = transfer.request, transfer.ranges
        targets = [_target(one, shard) for one in ranges]
        item = self._registry.receive(request.payload_key, buffer, targets, shard="" if shard is None else shard.name)

        def pull(number: int) -> None:
            try:
                sources = ranges[number].all_sources
                transfer.pullers[number].pull(request, item, number, sources, transfer.check, transfer.links)
            except Exception as error:  # noqa: BLE001 — the thread's boundary: one pull that fails fails the transfer
                transfer.stop(str(error))

        others: list[threading.Thread] = []
        try:
            for number in range(1, len(ranges)):
                thread = threading.Thread(target=pull, args=(number,), name="weight-puller")
                thread.start()
                others.append(thread)
        except RuntimeError as error:  # at a limit of threads
            transfer.stop(str(error))
        pull(0)
        for thread in others:
            thread.join()
        if transfer.stopped:
            self._registry.withdraw(item.key)
            raise WeightUpdateError(transfer.stopped)


def _target(one: PayloadRange, shard: Shard | None) -> Range:
    """Returns the empty range that a pulled one fills: its own bytes, or what the shard keeps of them."""
    if shard is None:
        return Range(one.start, one.end, one.start)
    start, end = shard.place(one.start)
    return Range(start, end, start, shard.stripes[one.start])


def _check_cover(ranges: Sequence[PayloadRange], num_bytes: int, *, is_delta: bool) -> None:
    """Raises ``WeightUpdateError`` unless the ranges cover the model. A delta is shorter than the stripe it changes."""
    upto = 0
    for start, end in sorted((one.start, one.end) for one in ranges):
        if not (upto <= start <= end if is_delta and upto else start == upto <= end):
            raise WeightUpdateError(f"after byte {upto} of the payload comes a range of bytes {start} to {end}")
        upto = end
    if upto > num_bytes or (upto < num_bytes and not is_delta):
        raise WeightUpdateError(f"the ranges cover {upto} of {num_bytes} bytes")
