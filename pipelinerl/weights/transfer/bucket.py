"""Transport of a bucket between two processes: in the connection, through NCCL, or as a handle of GPU memory.

The connection always carries the frame that announces a bucket, so all transports handle stalls and deaths alike.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from pipelinerl.config.backends import TransportName
from pipelinerl.weights.transfer.nccl import Group, IsDone
from pipelinerl.weights.transfer.wire import MESSAGE, Connection, WireError, view_of

CPU = torch.device("cpu")


class BucketTransport(Protocol):
    """One end of a connection."""

    def send_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        """Sends the bucket. Returns when its memory may change."""

    def receive_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        """Receives into the bucket. Returns when it is filled."""


class TcpTransport:
    """Sends the bytes after their frame. Buckets outside host memory are copied through host memory."""

    def __init__(self) -> None:
        self._bounce = torch.empty(0, dtype=torch.uint8)

    def send_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        connection.send_bytes(view_of(bucket if bucket.device == CPU else self._bounced(bucket).copy_(bucket)))

    def receive_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        if bucket.device == CPU:
            connection.read_into(view_of(bucket))
            return
        bounce = self._bounced(bucket)
        connection.read_into(view_of(bounce))
        bucket.copy_(bounce)

    def _bounced(self, bucket: torch.Tensor) -> torch.Tensor:
        if self._bounce.numel() < bucket.numel():
            self._bounce = torch.empty(bucket.numel(), dtype=torch.uint8, pin_memory=bucket.device.type == "cuda")
        return self._bounce[: bucket.numel()]


class NcclTransport:
    """Another member of an NCCL group. Each bucket waits until both ends have nothing else to do in the group."""

    def __init__(self, group: Group, member: int, patience_s: float):
        self._group, self._member, self._patience_s = group, member, patience_s

    def send_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        with self._group.turn(self._patience_s) as communicator:
            # It holds its own turn and asks for the puller's. No member is both, so no two wait for each other.
            connection.send(MESSAGE)
            _expect_message(connection)
            self._run(lambda: communicator.start_send(bucket, self._member))

    def receive_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        _expect_message(connection)
        with self._group.turn(self._patience_s) as communicator:
            connection.send(MESSAGE)
            self._run(lambda: communicator.start_receive(bucket, self._member))

    def _run(self, start: Callable[[], IsDone]) -> None:
        """Waits until the bucket has gone, also if the pull is interrupted: to leave earlier would break the group."""
        deadline = time.monotonic() + self._patience_s
        try:
            is_done = start()
        except RuntimeError as error:
            self._group.break_up()
            raise WireError(str(error)) from error
        while not is_done():
            if time.monotonic() > deadline:
                self._group.break_up()
                raise WireError(f"a bucket was not through NCCL within {self._patience_s:g} s")
            time.sleep(0.0005)  # a bucket takes milliseconds


class IpcTransport:
    """For two ends on one GPU. The source sends a memory handle after the frame, the puller copies and acknowledges."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)

    def send_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            staged = bucket.to(self._device)
            self._stream.synchronize()
        connection.send(MESSAGE, encode_ipc_handle(staged))
        _expect_message(connection)

    def receive_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        handle = connection.read(_expect_message(connection))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            bucket.copy_(decode_ipc_handle(handle, self._device))
            self._stream.synchronize()
        connection.send(MESSAGE)


TRANSPORTS: dict[TransportName, Callable[[torch.device], BucketTransport]] = {
    "tcp": lambda device: TcpTransport(),
    "ipc": IpcTransport,
}
"""Transports that need only the connection. `NcclTransport` needs a group."""


def _expect_message(connection: Connection) -> int:
    kind, length = connection.receive()
    if kind != MESSAGE:
        raise WireError(f"a frame of kind {kind} came instead of a handle")
    return length


def encode_ipc_handle(tensor: torch.Tensor) -> bytes:
    """Encodes the CUDA IPC handle of a contiguous uint8 tensor as JSON (numbers and hexadecimal bytes only)."""
    fields = tensor.untyped_storage()._share_cuda_()
    encoded = [field.hex() if isinstance(field, bytes) else field for field in fields]
    return msgspec.json.encode([encoded, tensor.storage_offset(), tensor.numel()])


def decode_ipc_handle(data: bytes, device: torch.device) -> torch.Tensor:
    """Maps the other process's memory as a tensor, which is valid until the owner receives the acknowledgement."""
    encoded, offset, numel = msgspec.json.decode(data)
    _, handle, size, storage_offset, counter, counter_offset, event, sync = encoded
    storage = torch.UntypedStorage._new_shared_cuda(  # noqa: SLF001 — maps the memory of a CUDA IPC handle
        device.index or 0,
        bytes.fromhex(handle),
        size,
        storage_offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, offset, (numel,), (1,))
