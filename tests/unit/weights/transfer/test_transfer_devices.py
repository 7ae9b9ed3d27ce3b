"""What a transfer does on GPUs, with stand-ins where this machine has none: threads, other buffers, calls of NCCL."""

import contextlib
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import ParamSpec, PayloadRange, Staged, WeightUpdateRequest
from pipelinerl.weights.staging_memory import CHANNELS
from pipelinerl.weights.transfer.bucket import TcpTransport
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.nccl import VllmNccl
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.source import SourceServer
from pipelinerl.weights.transfer.wire import Connection, WireError

GPU_1 = torch.device("cuda", 1)


def test_nccl_is_called_as_its_headers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's binding, whose library is a recorder: handle, size, id, rank and configuration of a communicator."""
    binding = pytest.importorskip("vllm.distributed.device_communicators.pynccl_wrapper")
    calls: list[Any] = []

    class Library(binding.NCCLLibrary):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            self._funcs = {
                name: partial(self._record, name)
                for name in ("ncclSend", "ncclRecv", "ncclCommAbort", "ncclCommDestroy")
            }
            self.lib = SimpleNamespace(ncclCommInitRankConfig=self.connect)

        @staticmethod
        def connect(handle: Any, size: int, unique_id: Any, rank: int, config: Any) -> int:
            handle._obj.value = 42
            read = config._obj
            calls.append((size, bytes(unique_id.internal), rank, read.size, read.magic, read.version, read.max_ctas))
            return 0

        def _record(self, name: str, *arguments: Any) -> int:
            calls.append((name, *(getattr(one, "value", one) for one in arguments)))
            return 0

    monkeypatch.setattr(binding, "NCCLLibrary", Library)
    monkeypatch.setattr(Library.connect, "restype", None, raising=False)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=lambda: True))
    communicator = VllmNccl(torch.device("cpu")).connect(bytes(range(128)), 1, 3)
    bucket = torch.zeros(64, dtype=torch.uint8)
    assert communicator.start_send(bucket, 2)()
    assert communicator.start_receive(bucket, 0)()
    communicator.abort()
    communicator.destroy()
    moved = (bucket.data_ptr(), 64, binding.ncclDataTypeEnum.ncclUint8)
    assert calls == [
        (3, bytes(range(128)), 1, 40, 0xCAFEBEEF, 21700, CHANNELS),
        ("ncclSend", *moved, 2, 42, 7),
        ("ncclRecv", *moved, 0, 42, 7),
        ("ncclCommAbort", 42),
        ("ncclCommDestroy", 42),
    ]


def test_tcp_fills_a_buffer_that_is_not_in_host_memory() -> None:
    """`meta` stands for a GPU: its memory is not the host's either."""
    read: list[int] = []
    connection: Any = SimpleNamespace(read_into=lambda view: read.append(len(view)))
    TcpTransport().receive_bucket(connection, torch.empty(64, dtype=torch.uint8, device="meta"))
    assert read == [64]


def test_receiver_works_on_its_own_gpu_and_waits_for_it_before_it_says_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ParamSpec("w", "bfloat16", (2, 32))
    num_bytes = Layout((spec,)).num_bytes
    registry = BufferRegistry()
    registry.put("s/1", torch.ones(num_bytes, dtype=torch.uint8))
    source_server = SourceServer(registry, secret="x", host="127.0.0.1")
    calls: list[Any] = []
    receiver = Receiver(
        index=0,
        host="127.0.0.1",
        secret="x",
        device=GPU_1,
        allocate=lambda size: torch.zeros(size, dtype=torch.uint8),
        prepare=lambda layout, buffer: calls.append(int(buffer.sum())),
    )
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: calls.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda: SimpleNamespace(synchronize=lambda: calls.append(("synchronize", receiver.transfer.end))),
    )
    part = PayloadRange(start=0, end=num_bytes, sources=(source_server.address,))
    request = WeightUpdateRequest(
        sender="s",
        version=1,
        params=(spec,),
        workers=((part,),),
        transport="tcp",
        bucket_bytes=num_bytes,
        timeout_s=60,
        stall_s=60,
    )
    try:
        assert isinstance(receiver.begin(request).reply(60), Staged)
        assert calls == [("weight-receiver", GPU_1), num_bytes, ("synchronize", None)]
    finally:
        receiver.close()
        source_server.close()


def test_connection_refuses_who_does_not_know_the_secret() -> None:
    source_server = SourceServer(BufferRegistry(), secret="right", host="127.0.0.1")
    try:
        for secret in ("wrong", ""):
            with pytest.raises(WireError):
                Connection.dial(source_server.address, secret, 2)
        Connection.dial(source_server.address, "right", 60).close()
    finally:
        source_server.close()
