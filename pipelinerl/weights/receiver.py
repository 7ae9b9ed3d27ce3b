"""The server's end of a transfer: all bytes go to a staging buffer in a background thread; decoding goes on.

A `Receiver` never touches the model. At most one transfer is current; a newer one supersedes it, and a superseded
transfer keeps its own buffer until its thread has ended, so nothing late can write into bytes that are used.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.delta import apply_delta
from pipelinerl.weights.group import TransferGroup, connect, first_line
from pipelinerl.weights.layout import Layout, buckets
from pipelinerl.weights.protocol import STALE, WeightUpdateRequest

log = logging.getLogger(__name__)

RECEIVING, STAGED, FAILED = "receiving", "staged", "failed"


@dataclass
class Transfer:
    """One update on its way."""

    request: WeightUpdateRequest
    layout: Layout
    state: str = RECEIVING
    error: str = ""
    transfer_ms: float = 0.0
    prepare_ms: float = 0.0
    superseded: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Receiver:
    """Receives updates for one worker.

    Args:
        rank: this worker's rank in every transfer group (1 …).
        allocate: makes a flat uint8 staging buffer of a number of bytes, where the swap wants to read it.
        prepare: called in the background thread with the layout and the staged bytes, before the pause.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: torch.device,
        allocate: Callable[[int], torch.Tensor],
        prepare: Callable[[Layout, torch.Tensor], None],
        join: Callable[..., TransferGroup] = connect,
    ):
        self._rank, self._device = rank, device
        self._allocate, self._prepare, self._join = allocate, prepare, join
        self._group: tuple[str, TransferGroup] | None = None
        self._buffer: torch.Tensor | None = None
        self._layout: Layout | None = None
        self._buffer_version: int | None = None
        """Version whose bytes the staging buffer holds; None while they are being replaced."""
        self._transfer: Transfer | None = None
        self._reading = threading.Lock()
        """Held while somebody reads the staged bytes of the live version."""

    @property
    def transfer(self) -> Transfer:
        assert self._transfer is not None, "no transfer was started"
        return self._transfer

    def staged(self) -> tuple[Layout, torch.Tensor]:
        """The bytes of a completed transfer."""
        assert self.transfer.state == STAGED, "nothing is staged"
        assert self._buffer is not None
        return self.transfer.layout, self._buffer

    @contextmanager
    def reading(self, version: int) -> Iterator[tuple[Layout, torch.Tensor] | None]:
        """The staged bytes of ``version``, which stay as they are meanwhile; None if a newer transfer has begun."""
        with self._reading:
            if self._buffer_version != version or self._layout is None or self._buffer is None:
                yield None
            else:
                yield self._layout, self._buffer

    def begin(self, request: WeightUpdateRequest) -> None:
        """Start receiving; returns at once.

        Raises:
            WeightUpdateError: the request builds on a group or a version that is not here.
        """
        layout = Layout(request.params)
        if self._transfer is not None and self._transfer.state == RECEIVING:
            self._transfer.superseded.set()
            self._group = self._buffer = self._buffer_version = None
        if not request.group.is_new and (self._group is None or self._group[0] != request.group.name):
            raise WeightUpdateError(f"{STALE} group: this server is not in {request.group.name}")
        held = self._buffer_version if layout == self._layout else None
        if request.base_version is not None and request.base_version != held:
            raise WeightUpdateError(
                f"{STALE} base: the delta is against version {request.base_version}, held is {held}"
            )
        transfer = Transfer(request=request, layout=layout)
        transfer.thread = threading.Thread(target=self._run, args=(transfer,), name="weight-receiver", daemon=True)
        self._transfer = transfer
        transfer.thread.start()

    def abandon(self) -> None:
        """Nobody waits for the current transfer any more."""
        if self._transfer is not None and self._transfer.state == RECEIVING:
            self._transfer.superseded.set()
            self._transfer.state, self._transfer.error = FAILED, "abandoned"
            self._group = self._buffer = self._buffer_version = None

    def close(self) -> None:
        """Let go of the trainer: a later update joins a new group."""
        self.abandon()
        self._group = None

    def _run(self, transfer: Transfer) -> None:
        """Consumes the group's buckets, produces a staged buffer. Ends at the last byte, an error, the deadline or
        when superseded."""
        started = time.monotonic()
        on_gpu = self._device.type == "cuda"
        try:
            if on_gpu:
                torch.cuda.set_device(self._device)  # a new thread's is GPU 0
            buffer = self._receive(transfer, started + transfer.request.timeout_s)
            received = time.monotonic()
            transfer.transfer_ms = 1e3 * (received - started)
            self._prepare(transfer.layout, buffer)
            if on_gpu:
                torch.cuda.current_stream().synchronize()  # the swap reads the buffer on another stream
            transfer.prepare_ms = 1e3 * (time.monotonic() - received)
        except Exception as error:  # the thread's boundary: the error becomes the transfer's
            if not transfer.superseded.is_set():
                self._group = None
                transfer.error = f"{type(error).__name__}: {error}"
                transfer.state = FAILED
            log.warning("event=weight_transfer_failed version=%d error=%s", transfer.request.version, first_line(error))
            return
        if not transfer.superseded.is_set():
            transfer.state = STAGED

    def _receive(self, transfer: Transfer, deadline: float) -> torch.Tensor:
        request, layout = transfer.request, transfer.layout
        group = self._joined(transfer, deadline)
        if request.base_version is None:
            buffer = self._staging(transfer)
            self._receive_into(buffer, group, transfer, deadline)
        else:
            assert request.payload_bytes is not None, "checked by the server"
            assert self._buffer is not None, "held by the check in begin"
            payload = torch.empty(request.payload_bytes, dtype=torch.uint8)
            self._receive_into(payload, group, transfer, deadline)
            buffer = self._buffer
            self._end_reading()
            apply_delta(buffer, payload)
        self._check(transfer)
        self._layout, self._buffer_version = layout, request.version
        return buffer

    def _receive_into(self, buffer: torch.Tensor, group: TransferGroup, transfer: Transfer, deadline: float) -> None:
        for bucket in buckets(buffer, transfer.request.bucket_bytes):
            group.broadcast(bucket, deadline, lambda: self._check(transfer))

    def _joined(self, transfer: Transfer, deadline: float) -> TransferGroup:
        spec = transfer.request.group
        if self._group is not None and self._group[0] == spec.name:
            return self._group[1]
        group = self._join(spec, self._rank, self._device, deadline, lambda: self._check(transfer))
        self._check(transfer)
        self._group = (spec.name, group)
        return group

    def _staging(self, transfer: Transfer) -> torch.Tensor:
        """The kept buffer if it fits; the model's size does not change between updates."""
        self._check(transfer)
        self._end_reading()
        if self._buffer is None or self._buffer.numel() != transfer.layout.num_bytes:
            self._buffer = None
            self._buffer = self._allocate(transfer.layout.num_bytes)
        return self._buffer

    def _end_reading(self) -> None:
        """The bytes are about to change: nobody begins to read them, and who reads them ends first."""
        self._buffer_version = None
        with self._reading:
            pass

    @staticmethod
    def _check(transfer: Transfer) -> None:
        if transfer.superseded.is_set():
            raise WeightUpdateError("superseded by a newer update")
