"""The NCCL groups of one process, over which buckets go to and from other processes.

Consumes: the trainer's orders to join a group (`JoinGroup`). Produces: groups that `bucket.NcclTransport` uses. A group
exists until the connection over which it was ordered ends. NCCL has no deadlines, so every call that may block has its
own thread, which is left behind after a time-out.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import Address, JoinGroup
from pipelinerl.weights.staging_memory import CHANNELS
from pipelinerl.weights.transfer.wire import Connection, WireError

log = logging.getLogger(__name__)

END_S = 5.0
"""An end of a communicator that takes longer goes on in its thread."""
_UNSET, _MAGIC, _CONFIG_VERSION = -(2**31), 0xCAFEBEEF, 21700  # of nccl.h

T = TypeVar("T")
IsDone = Callable[[], bool]


class Communicator(Protocol):
    """One member's end of an NCCL communicator."""

    def start_send(self, bucket: torch.Tensor, member: int) -> IsDone: ...

    def start_receive(self, bucket: torch.Tensor, member: int) -> IsDone: ...

    def destroy(self) -> None:
        """Frees it. Nothing is under way."""

    def abort(self) -> None:
        """Ends what is under way, and frees it."""


class Library(Protocol):
    """NCCL."""

    def unique_id(self) -> bytes: ...

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Returns when all members have called it. Never, if one does not."""


class VllmNccl:
    """NCCL through vLLM's binding. Both ends have vLLM's GPU build installed. Takes seconds to import."""

    def __init__(self, device: torch.device):
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclComm_t, ncclUniqueId

        self._device, self._library, self._handle = device, NCCLLibrary(), ncclComm_t
        self._connect = self._library.lib.ncclCommInitRankConfig  # vLLM binds the one without a configuration
        self._connect.restype = ctypes.c_int
        self._connect.argtypes = [ctypes.POINTER(ncclComm_t), ctypes.c_int, ncclUniqueId, ctypes.c_int, ctypes.c_void_p]

    def unique_id(self) -> bytes:
        return bytes(self._library.ncclGetUniqueId().internal)

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        config, handle = NcclConfig.with_channels(CHANNELS), self._handle()
        with torch.cuda.device(self._device):
            called_id = self._library.unique_id_from_bytes(unique_id)
            result = self._connect(ctypes.byref(handle), size, called_id, rank, ctypes.byref(config))
            self._library.NCCL_CHECK(result)
            return VllmCommunicator(self._library, handle, self._device)


class NcclConfig(ctypes.Structure):
    """``ncclConfig_v21700`` of nccl.h. Newer versions of NCCL take it and add what it does not have."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )

    @classmethod
    def with_channels(cls, most: int) -> "NcclConfig":
        return cls(ctypes.sizeof(cls), _MAGIC, _CONFIG_VERSION, _UNSET, _UNSET, 1, most, None)


class VllmCommunicator:
    """A communicator with a stream of its own."""

    def __init__(self, library: Any, handle: Any, device: torch.device):
        self._library, self._handle, self._device = library, handle, device
        self._stream: Any = torch.cuda.Stream(device)

    def start_send(self, bucket: torch.Tensor, member: int) -> IsDone:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = bucket.to(self._device, non_blocking=True)
            self._library.ncclSend(*self._arguments(on_device, member))
            return self._marked(on_device)

    def start_receive(self, bucket: torch.Tensor, member: int) -> IsDone:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = bucket if bucket.device == self._device else torch.empty_like(bucket, device=self._device)
            self._library.ncclRecv(*self._arguments(on_device, member))
            if on_device is not bucket:
                bucket.copy_(on_device, non_blocking=True)
            return self._marked(on_device)

    def destroy(self) -> None:
        with torch.cuda.device(self._device):
            self._library.ncclCommDestroy(self._handle)

    def abort(self) -> None:
        with torch.cuda.device(self._device):
            self._library.ncclCommAbort(self._handle)

    def _arguments(self, bucket: torch.Tensor, member: int) -> tuple[Any, ...]:
        from vllm.distributed.device_communicators.pynccl_wrapper import buffer_type, cudaStream_t, ncclDataTypeEnum

        stream = cudaStream_t(self._stream.cuda_stream)
        return buffer_type(bucket.data_ptr()), bucket.numel(), ncclDataTypeEnum.ncclUint8, member, self._handle, stream

    def _marked(self, bucket: torch.Tensor) -> IsDone:
        """Returns a function that tells whether all started work is done. Keeps the bucket's memory until then."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return lambda: bucket is not None and event.query()


@dataclass(eq=False)
class Group:
    """This process's end of a group."""

    order: JoinGroup
    communicator: Communicator
    control: Connection
    """The connection over which it was ordered. Whoever ends it ends the group."""
    is_broken: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def turn(self, patience_s: float) -> Iterator[Communicator]:
        """Lets nobody else use the communicator, whose transfers must be started in the same order on both ends.

        Raises:
            WireError: it is broken, or others have used it for ``patience_s``.
        """
        if not self._turn.acquire(timeout=patience_s):
            raise WireError(f"NCCL group {self.order.name} was in use for {patience_s:g} s")
        try:
            if self.is_broken:
                raise WireError(f"NCCL group {self.order.name} is broken")
            yield self.communicator
        finally:
            self._turn.release()

    def break_up(self) -> None:
        """Has all members leave, because a transfer does not end."""
        self.is_broken = True
        self.control.interrupt()

    def end(self) -> None:
        """Frees the communicator."""
        broken, self.is_broken = self.is_broken, True
        if broken or not self._turn.acquire(timeout=END_S):  # a transfer hangs
            _end(self.communicator.abort)
        else:
            self._turn.release()
            _end(self.communicator.destroy)


class Groups:
    """The groups of one process. Thread-safe."""

    def __init__(self, load: Callable[[], Library]):
        self._load = load
        self._library: Future[Library] | None = None
        self._groups: dict[str, Group] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._groups)

    def preload(self) -> "Future[Library]":
        """Begins to load NCCL, and returns the future library."""
        with self._lock:
            if self._library is None or (self._library.done() and self._library.exception() is not None):
                self._library = in_thread(self._load, "nccl-load")
            return self._library

    def unique_id(self, timeout_s: float) -> bytes:
        """Returns the name of a new communicator. Its members find each other through this process."""
        library = _result(self.preload(), timeout_s, "NCCL was not loaded")
        return _result(in_thread(library.unique_id, "nccl-id"), timeout_s, "NCCL gave no id")

    def join(self, order: JoinGroup, control: Connection) -> Group:
        """Becomes a member of a group.

        Raises:
            WeightUpdateError: not all members joined within ``order.timeout_s``, or NCCL failed.
        """
        for other in [group for group in tuple(self._groups.values()) if group.order.sender != order.sender]:
            other.break_up()  # of a trainer that is gone
        library = _result(self.preload(), order.timeout_s, "NCCL was not loaded")
        unique_id, size = bytes.fromhex(order.unique_id), len(order.members)
        joining = in_thread(lambda: library.connect(unique_id, order.rank, size), "nccl-connect")
        try:
            communicator = _result(joining, order.timeout_s, f"not all {size} members joined NCCL group {order.name}")
        except WeightUpdateError:
            joining.add_done_callback(_end_late)
            raise
        with self._lock:
            self._groups[order.name] = group = Group(order, communicator, control)
        return group

    def leave(self, name: str) -> None:
        with self._lock:
            group = self._groups.pop(name, None)
        if group is not None:
            group.end()

    def get(self, name: str) -> Group | None:
        """Returns a group that may be used."""
        group = self._groups.get(name)
        return None if group is None or group.is_broken else group

    def over(self, source: Address) -> Group | None:
        """Returns a group over which this process takes bytes from ``source``."""
        for group in tuple(self._groups.values()):
            order = group.order
            if not group.is_broken and source in order.members[: order.num_sources] and order.rank >= order.num_sources:
                return group
        return None


def in_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Calls ``work`` in a thread that nobody has to wait for, not even the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 — the thread's boundary: handed to whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _result(future: "Future[T]", timeout_s: float, otherwise: str) -> T:
    try:
        return future.result(timeout_s)
    except TimeoutError as error:
        raise WeightUpdateError(f"{otherwise} within {timeout_s:g} s") from error
    except Exception as error:
        raise WeightUpdateError(f"NCCL failed: {error}") from error


def _end_late(joining: "Future[Communicator]") -> None:
    """Frees a communicator that came when nobody waited for it any more."""
    if joining.exception() is None:
        _end(joining.result().abort)


def _end(work: Callable[[], None]) -> None:
    with suppress(TimeoutError):
        if (error := in_thread(work, "nccl-end").exception(END_S)) is not None:
            log.warning("event=nccl_not_freed error=%s", error)
