"""What a transfer does on GPUs, with stand-ins where this machine has none: threads, aborts, buffers elsewhere."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import ParamSpec, PayloadRange, Staged, WeightUpdateRequest
from pipelinerl.weights.transfer.bucket import NcclTransport, TcpTransport
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.source import SourceServer
from pipelinerl.weights.transfer.wire import Connection, WireError

GPU_1 = torch.device("cuda", 1)


def test_transfer_that_never_ends_is_aborted_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=lambda: False))
    calls: list[str] = []
    bucket_transport = NcclTransport.__new__(NcclTransport)
    bucket_transport._device, bucket_transport._stream = torch.device("cpu"), None
    bucket_transport._communicator = SimpleNamespace(  # type: ignore[assignment]
        send=lambda *args, **kwargs: calls.append("send"), destroy=lambda: calls.append("destroy")
    )

    def check_patience(moved: float) -> None:
        raise WireError("not a byte for 5 s")

    connection: Any = SimpleNamespace(check_patience=check_patience)
    with pytest.raises(WireError, match="not a byte"):
        bucket_transport.send_bucket(connection, torch.zeros(64, dtype=torch.uint8))
    assert calls == ["send", "destroy"]


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
        timeout_s=20,
        stall_s=5,
    )
    try:
        assert isinstance(receiver.begin(request).reply(20), Staged)
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
        Connection.dial(source_server.address, "right", 2).close()
    finally:
        source_server.close()
