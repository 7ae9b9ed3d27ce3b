"""The transfer group: the trainer (rank 0) and the workers of ONE server (ranks 1 …), bytes in one direction.

One group per server, so that a dead or frozen server fails nobody else's transfer. The trainer hosts the rendezvous
store; every (re)connection uses a fresh name in it. Nothing here waits without a deadline, and a group in which
anything failed is thrown away, never used again.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import GroupSpec

POLL_S = 0.0005
MAX_POLL_S = 0.01


class TransferGroup(Protocol):
    """One connection; `device` is where buffers must lie."""

    device: torch.device

    def broadcast(self, buffer: torch.Tensor, deadline: float, check: Callable[[], None]) -> None:
        """Send (rank 0) or receive (others) one bucket; `check` is called while waiting and may raise."""


class GlooGroup:
    """Gloo over TCP, bound to the address through which the store is reached. The trainer's buffers lie in memory, a
    server's anywhere."""

    device = torch.device("cpu")

    def __init__(self, store: dist.Store, rank: int, world_size: int, address: str, timeout_s: float):
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch has it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, buffer: torch.Tensor, deadline: float, check: Callable[[], None]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=remaining(deadline))
        in_memory = buffer if buffer.device == self.device else torch.empty_like(buffer, device=self.device)
        work = self._group.broadcast([in_memory], options)  # type: ignore[attr-defined]  # torch has it
        pause = POLL_S
        while not work.is_completed():
            check()
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)
        work.wait()
        if in_memory is not buffer:
            buffer.copy_(in_memory)


class NcclGroup:
    """NCCL through vLLM's communicator (both ends have vLLM's GPU build installed).

    A broadcast whose peer is gone would run on the GPU for ever and hold up all who wait for the device: it is aborted.
    The communicator's id travels through the store as the 128 bytes that it is: vLLM's own rendezvous would pickle it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, device: torch.device):
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self.device = device
        self._rank = rank
        if rank == 0:
            store.set("nccl_id", bytes(NCCLLibrary().ncclGetUniqueId().internal))  # type: ignore[arg-type]  # torch takes bytes
        self._communicator = PyNcclCommunicator.from_unique_id_bytes(store.get("nccl_id"), rank, world_size, device)
        self._stream = torch.cuda.Stream(device)

    def broadcast(self, buffer: torch.Tensor, deadline: float, check: Callable[[], None]) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            on_device = buffer if buffer.is_cuda else torch.empty_like(buffer, device=self.device)
            if self._rank == 0:
                on_device.copy_(buffer, non_blocking=True)
            self._communicator.broadcast(on_device, src=0, stream=self._stream)
            if self._rank != 0 and on_device is not buffer:
                buffer.copy_(on_device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        try:
            while not done.query():
                check()
                remaining(deadline)
                time.sleep(POLL_S)
        except BaseException:
            self._communicator.destroy()
            raise


class IpcGroup:
    """Trainer and server on one GPU: the trainer's handle of each bucket goes through the store, the server copies."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, device: torch.device):
        self.device = device
        self._store, self._rank, self._world_size, self._bucket = store, rank, world_size, 0
        self._stream = torch.cuda.Stream(device)

    def broadcast(self, buffer: torch.Tensor, deadline: float, check: Callable[[], None]) -> None:
        key, self._bucket = f"bucket/{self._bucket}", self._bucket + 1
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if self._rank == 0:
                self._hand_over(key, buffer, deadline, check)
            else:
                self._take(key, buffer, deadline, check)

    def _hand_over(self, key: str, buffer: torch.Tensor, deadline: float, check: Callable[[], None]) -> None:
        staged = buffer.to(self.device)
        self._stream.synchronize()
        self._store.set(key, encode_ipc_handle(staged))  # type: ignore[arg-type]  # torch takes bytes
        taken = [f"{key}/taken/{rank}" for rank in range(1, self._world_size)]
        while not self._store.check(taken):
            check()
            remaining(deadline)
            time.sleep(POLL_S)
        for name in (key, *taken):
            self._store.delete_key(name)

    def _take(self, key: str, buffer: torch.Tensor, deadline: float, check: Callable[[], None]) -> None:
        while not self._store.check([key]):
            check()
            remaining(deadline)
            time.sleep(POLL_S)
        buffer.copy_(decode_ipc_handle(self._store.get(key), self.device))
        self._stream.synchronize()
        self._store.set(f"{key}/taken/{self._rank}", b"1")  # type: ignore[arg-type]  # torch takes bytes


def encode_ipc_handle(tensor: torch.Tensor) -> bytes:
    """A CUDA IPC handle of a contiguous uint8 tensor as JSON (numbers and hexadecimal bytes only)."""
    import msgspec

    fields = tensor.untyped_storage()._share_cuda_()
    encoded = [field.hex() if isinstance(field, bytes) else field for field in fields]
    return msgspec.json.encode([encoded, tensor.storage_offset(), tensor.numel()])


def decode_ipc_handle(data: bytes, device: torch.device) -> torch.Tensor:
    """The other process's memory as a tensor of this process; valid until the owner is told that it was taken."""
    import msgspec

    encoded, offset, numel = msgspec.json.decode(data)
    _, handle, size, storage_offset, counter, counter_offset, event, sync = encoded
    storage = torch.UntypedStorage._new_shared_cuda(
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


def connect(
    spec: GroupSpec, rank: int, device: torch.device, deadline: float, check: Callable[[], None]
) -> TransferGroup:
    """A server's worker joins the group; returns when the trainer is there too.

    Raises:
        WeightUpdateError: the store or the trainer did not answer before the deadline.
    """
    try:
        timeout = timedelta(seconds=remaining(deadline))
        store = dist.TCPStore(spec.host, spec.port, is_master=False, timeout=timeout, wait_for_workers=False)
        return join(store, spec, rank, device, deadline, check)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise WeightUpdateError(
            f"cannot join transfer group {spec.name} at {spec.host}:{spec.port}: {first_line(error)}"
        ) from error


def join(
    store: dist.Store, spec: GroupSpec, rank: int, device: torch.device, deadline: float, check: Callable[[], None]
) -> TransferGroup:
    """Join the named group of a store that is already connected."""
    scoped = dist.PrefixStore(spec.name, store)
    _meet(scoped, rank, spec.world_size, deadline, check)
    timeout_s = remaining(deadline)
    if spec.backend == "gloo":
        return GlooGroup(scoped, rank, spec.world_size, local_address(spec.host, spec.port), timeout_s)
    if spec.backend == "nccl":
        return NcclGroup(scoped, rank, spec.world_size, device)
    return IpcGroup(scoped, rank, spec.world_size, device)


def _meet(store: dist.Store, rank: int, world_size: int, deadline: float, check: Callable[[], None]) -> None:
    """Wait for all members in a way that `check` can end: a backend's own rendezvous cannot be interrupted."""
    store.set(f"here/{rank}", b"1")  # type: ignore[arg-type]  # torch takes bytes
    members = [f"here/{member}" for member in range(world_size)]
    while not store.check(members):
        check()
        remaining(deadline)
        time.sleep(MAX_POLL_S)


def host_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The trainer's store for one server; ``port`` 0 takes a free one (see ``store.port``)."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        bound,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def local_address(host: str, port: int) -> str:
    """This machine's address towards a host: what to bind so that exactly the peers can reach it."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def remaining(deadline: float) -> float:
    """Seconds until a `time.monotonic` deadline; raises when it is past."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise WeightUpdateError("the transfer's deadline has passed")
    return left


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
