"""Transport of a bucket between two processes: in the connection, through NCCL, or as a handle of GPU memory.

The connection always carries the frame that announces a bucket, so stalls, deaths and byte offsets are handled in the
same way for all bucket transports. A bucket transport belongs to one connection and ends with it.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from pipelinerl.config.backends import TransportName
from pipelinerl.weights.transfer.wire import MESSAGE, Connection, WireError, view_of

POLL_S = 0.0005
CPU = torch.device("cpu")


class BucketTransport(Protocol):
    """One end of a connection."""

    def send_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        """Sends the bucket. Returns when its memory may change."""

    def receive_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        """Receives into the bucket. Returns when it is filled."""


def make_transport(
    transport: TransportName, connection: Connection, device: torch.device, *, sends: bool
) -> BucketTransport:
    """Returns one end of a bucket transport. Both ends must call this at the same point of their protocol."""
    return TRANSPORTS[transport](connection, device, sends)


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
    """A communicator of two through vLLM (both ends have vLLM's GPU build installed).

    A transfer whose other end is gone would block the GPU for ever, so it is aborted. The communicator's id is sent as
    its 128 raw bytes, because vLLM's own rendezvous would pickle it.
    """

    def __init__(self, connection: Connection, device: torch.device, *, sends: bool):
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._device = device
        if sends:
            unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
            connection.send(MESSAGE, unique_id)
        else:
            kind, length = connection.receive()
            if kind != MESSAGE:
                raise WireError(f"a frame of kind {kind} came instead of a communicator's id")
            unique_id = connection.read(length)
        self._communicator = PyNcclCommunicator.from_unique_id_bytes(unique_id, 0 if sends else 1, 2, device)
        self._stream = torch.cuda.Stream(device)

    def send_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = bucket.to(self._device, non_blocking=True)
            self._communicator.send(on_device, dst=1, stream=self._stream)
            self._wait(connection)

    def receive_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = bucket if bucket.is_cuda else torch.empty_like(bucket, device=self._device)
            self._communicator.recv(on_device, src=0, stream=self._stream)
            if on_device is not bucket:
                bucket.copy_(on_device, non_blocking=True)
            self._wait(connection)

    def _wait(self, connection: Connection) -> None:
        """Waits until the stream is done, the connection's patience ends, or ``interrupt`` is called."""
        done = torch.cuda.Event()
        done.record(self._stream)
        started = time.monotonic()
        try:
            while not done.query():
                connection.check_patience(started)
                time.sleep(POLL_S)
        except BaseException:
            self._communicator.destroy()
            raise


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


TRANSPORTS: dict[TransportName, Callable[[Connection, torch.device, bool], BucketTransport]] = {
    "tcp": lambda _connection, _device, _sends: TcpTransport(),
    "nccl": lambda connection, device, sends: NcclTransport(connection, device, sends=sends),
    "ipc": lambda _connection, device, _sends: IpcTransport(device),
}


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
