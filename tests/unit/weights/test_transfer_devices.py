"""What a transfer does on GPUs, with stand-ins where this machine has none: threads, aborts, buffers elsewhere."""

import contextlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipelinerl.weights.group import NcclGroup, connect, host_store, join

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import GroupSpec, ParamSpec, WeightUpdateRequest
from pipelinerl.weights.receiver import STAGED, Receiver

GPU_1 = torch.device("cuda", 1)


def group_spec(backend: str, port: int) -> GroupSpec:
    return GroupSpec(backend=backend, host="127.0.0.1", port=port, name="g", world_size=2, is_new=True)  # type: ignore[arg-type]


def test_broadcast_that_never_ends_is_aborted_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, query=lambda: False))
    calls: list[str] = []
    group = NcclGroup.__new__(NcclGroup)
    group.device, group._rank, group._stream = torch.device("cpu"), 0, None
    group._communicator = SimpleNamespace(
        broadcast=lambda *args, **kwargs: calls.append("broadcast"), destroy=lambda: calls.append("destroy")
    )

    def peer_is_gone() -> None:
        raise WeightUpdateError("the server ended the transfer")

    with pytest.raises(WeightUpdateError, match="ended the transfer"):
        group.broadcast(torch.zeros(64, dtype=torch.uint8), time.monotonic() + 60, peer_is_gone)
    assert calls == ["broadcast", "destroy"]


def test_gloo_fills_a_buffer_that_is_not_in_host_memory() -> None:
    """`meta` stands for a GPU: Gloo itself refuses it, as it refuses CUDA where it is built without."""
    store = host_store("127.0.0.1", 0, 20)
    spec, deadline = group_spec("gloo", store.port), time.monotonic() + 20
    sent = torch.arange(64, dtype=torch.uint8)

    def send() -> None:
        join(store, spec, 0, torch.device("cuda:0"), deadline, lambda: None).broadcast(sent, deadline, lambda: None)

    sender = threading.Thread(target=send)
    sender.start()
    group = connect(spec, 1, torch.device("meta"), deadline, lambda: None)
    group.broadcast(torch.empty(64, dtype=torch.uint8, device="meta"), deadline, lambda: None)
    sender.join(20)
    assert not sender.is_alive()


def test_receiver_works_on_its_own_gpu_and_waits_for_it_before_it_says_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    receiver = Receiver(
        rank=1,
        device=GPU_1,
        allocate=lambda size: torch.zeros(size, dtype=torch.uint8),
        prepare=lambda layout, buffer: calls.append("prepare"),
        join=lambda *args: SimpleNamespace(broadcast=lambda *args: calls.append("bytes")),
    )

    def synchronize() -> None:
        calls.append(("synchronize", receiver.transfer.state))

    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: calls.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=synchronize))
    spec = ParamSpec("w", "bfloat16", (2, 2))
    receiver.begin(
        WeightUpdateRequest(
            version=1, params=(spec,), group=group_spec("nccl", 1), bucket_bytes=Layout((spec,)).num_bytes, timeout_s=20
        )
    )
    assert receiver.transfer.thread is not None
    receiver.transfer.thread.join(20)
    assert receiver.transfer.state == STAGED
    assert calls == [("weight-receiver", GPU_1), "bytes", "prepare", ("synchronize", "receiving")]
