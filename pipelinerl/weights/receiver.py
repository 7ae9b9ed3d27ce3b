"""One worker's end of an update: all bytes go to a staging buffer in the background, and on to the next worker.

A `Receiver` never touches the model. At most one transfer is current. A newer one supersedes it, and begins to write
when the older one's threads have ended, so nothing late can write into bytes that are used.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.carriage import CPU
from pipelinerl.weights.delta import apply_delta
from pipelinerl.weights.giver import Giver
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import STALE, Address, Failed, Part, Staged, WeightUpdateRequest
from pipelinerl.weights.shelf import Shelf
from pipelinerl.weights.taker import Taker

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Transfer:
    """One update on its way to one worker."""

    request: WeightUpdateRequest
    layout: Layout
    parts: tuple[Part, ...]
    takers: list[Taker]
    previous: threading.Thread | None
    """The thread of the update that this one supersedes."""
    thread: threading.Thread | None = None
    stopped: str = ""
    """Why no more bytes are wanted."""
    end: Staged | Failed | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    deadline: float = math.inf

    def reply(self, timeout_s: float) -> Staged | Failed | None:
        """How it ended; None if it is still going on after ``timeout_s``."""
        self.ended.wait(timeout_s)
        return self.end

    def stop(self, reason: str) -> None:
        """No more bytes are wanted. From any thread."""
        if not self.stopped:
            self.stopped = reason
        for taker in self.takers:
            taker.interrupt()

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        if self.end is None:
            self.stop("abandoned")

    def close(self, end: Staged | Failed) -> None:
        self.end = end
        self.ended.set()

    def check(self, doing: str = "") -> None:
        """Raise if it must end."""
        if self.stopped:
            raise WeightUpdateError(self.stopped)
        if time.monotonic() > self.deadline:
            raise WeightUpdateError(f"not all bytes came within {self.request.timeout_s:g} s ({doing})")


class Receiver:
    """Receives updates for one worker, and gives them to others.

    Args:
        index: this worker's place in its server (0 …).
        host: the name under which other workers reach this one.
        secret: the run's.
        allocate: makes a flat uint8 staging buffer of a number of bytes, where the swap wants to read it.
        prepare: called in the background thread with the layout and the staged bytes, before the pause.
        pace: see `Giver`.
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
        pace: Callable[[int], None] | None = None,
    ):
        self._index, self._secret, self._device = index, secret, device
        self._allocate, self._prepare = allocate, prepare
        self._shelf = Shelf()
        self.giver = Giver(self._shelf, secret=secret, host=host, device=device, on_take=self.begin, pace=pace)
        self._takers: list[Taker] = []
        self._staged: tuple[Layout, torch.Tensor, str] | None = None
        """Layout, bytes and key of the newest whole version; None while they are being replaced."""
        self._buffer: torch.Tensor | None = None
        self._transfer: Transfer | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """Held while somebody reads the staged bytes of the live version."""

    @property
    def address(self) -> Address:
        return self.giver.address

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None, "no transfer was started"
        return self._transfer

    def staged(self, version: int) -> tuple[Layout, torch.Tensor]:
        """The bytes of a completed transfer."""
        assert isinstance(self.transfer.end, Staged), "nothing is staged"
        assert self.transfer.request.version == version, "another transfer came between"
        assert self._staged is not None
        return self._staged[:2]

    @contextmanager
    def reading(self, version: int) -> Iterator[tuple[Layout, torch.Tensor] | None]:
        """The staged bytes of ``version``, which stay as they are meanwhile; None if a newer transfer has begun."""
        with self._reading:
            staged = self._staged
            is_there = staged is not None and staged[2].rpartition("/")[2] == str(version)
            yield staged[:2] if staged is not None and is_there else None

    def begin(self, request: WeightUpdateRequest) -> Transfer:
        """Start receiving; returns at once.

        Raises:
            WeightUpdateError: the request builds on a version that is not here, or does not fit this worker.
        """
        layout = Layout(request.params)
        if self._index >= len(request.workers):
            raise WeightUpdateError(f"the update has parts for {len(request.workers)} workers, this is {self._index}")
        parts = request.workers[self._index]
        with self._lock:
            if self._transfer is not None and self._transfer.end is None:
                self._transfer.stop("superseded by a newer update")
            self._check_base(request, layout)
            previous = self._transfer.thread if self._transfer is not None else None
            while len(self._takers) < len(parts):
                self._takers.append(Taker(self._shelf, secret=self._secret, device=self._device))
            transfer = Transfer(request, layout, parts, self._takers[: len(parts)], previous)
            transfer.thread = threading.Thread(target=self._run, args=(transfer,), name="weight-receiver", daemon=True)
            self._transfer = transfer
            transfer.thread.start()
        return transfer

    def close(self) -> None:
        """Let go of everybody."""
        if self._transfer is not None:
            self._transfer.abandon()
            if self._transfer.thread is not None:
                self._transfer.thread.join()
        self.giver.close()
        for taker in self._takers:
            taker.close()

    def _check_base(self, request: WeightUpdateRequest, layout: Layout) -> None:
        if request.base_version is None:
            return
        held = None if self._staged is None or self._staged[0] != layout else self._staged[2]
        if held != f"{request.sender}/{request.base_version}":
            raise WeightUpdateError(f"{STALE} base: the delta is against {request.base_version}, held is {held}")

    def _run(self, transfer: Transfer) -> None:
        """Consumes the sources' bytes, produces a staged buffer. Ends at the last byte, an error, the deadline or when
        superseded."""
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
            self._prepare(transfer.layout, buffer)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the swap reads the buffer on another stream
            transfer.check()
        except Exception as error:  # the thread's boundary: the error becomes the transfer's
            log.warning("event=weight_transfer_failed version=%d error=%s", transfer.request.version, error)
            transfer.close(Failed(error=f"{type(error).__name__}: {error}"))
            return
        prepare_ms = 1e3 * (time.monotonic() - received)
        transfer.close(Staged(transfer_ms=1e3 * (received - started), prepare_ms=prepare_ms))

    def _receive(self, transfer: Transfer) -> torch.Tensor:
        """The whole version's bytes, on the shelf."""
        request, layout = transfer.request, transfer.layout
        transfer.check()
        if request.base_version is None:
            buffer = self._replace()
            if buffer is None or buffer.numel() != layout.num_bytes:
                self._buffer = buffer = None
                self._buffer = buffer = self._allocate(layout.num_bytes)
            self._pull(transfer, buffer)
        else:
            self._shelf.keep_only(f"{request.sender}/{request.base_version}")
            payload = torch.empty(max(part.end for part in transfer.parts), dtype=torch.uint8, device=CPU)
            self._pull(transfer, payload)
            base = self._replace(request.payload_key)
            assert base is not None, "checked when the update began"
            buffer = base
            apply_delta(buffer, payload)
            self._shelf.put(request.whole_key, buffer)
        self._staged = (layout, buffer, request.whole_key)
        return buffer

    def _pull(self, transfer: Transfer, buffer: torch.Tensor) -> None:
        """All parts at once. Those who pull from here get them as they come."""
        request, parts = transfer.request, transfer.parts
        item = self._shelf.receive(request.payload_key, buffer, [(part.start, part.end) for part in parts])

        def pull(number: int) -> None:
            try:
                transfer.takers[number].pull(request, item, number, parts[number].sources, transfer.check)
            except Exception as error:  # the thread's boundary: one part that fails fails the transfer
                transfer.stop(str(error))

        others = [threading.Thread(target=pull, args=(n,), name="weight-taker") for n in range(1, len(parts))]
        for thread in others:
            thread.start()
        pull(0)
        for thread in others:
            thread.join()
        if transfer.stopped:
            self._shelf.withdraw(item.key)
            raise WeightUpdateError(transfer.stopped)
        if item.filled(0) != buffer.numel():
            raise WeightUpdateError(f"the parts cover {item.filled(0)} of {buffer.numel()} bytes")

    def _replace(self, *kept: str) -> torch.Tensor | None:
        """The staging buffer, which nobody reads any more: its bytes are about to change."""
        self._shelf.keep_only(*kept)
        with self._reading:
            self._staged = None
        return self._buffer
