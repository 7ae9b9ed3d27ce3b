"""What a source server counts."""

import threading

import pytest
import torch

from pipelinerl.weights.layout import ParamSpec
from pipelinerl.weights.protocol import PayloadRange, Staged, WeightUpdateRequest
from pipelinerl.weights.transfer.bucket import TRANSPORTS, TcpTransport
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.source import SourceServer
from pipelinerl.weights.transfer.wire import Connection

NUM_BYTES, BUCKET = 256, 96
"""Two buckets and a smaller one."""


def test_bucket_is_counted_when_its_taker_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source server's threads stand still after the last byte has left, until the pullers' counts were compared."""
    compared = threading.Event()

    class Held(TcpTransport):
        def send_bucket(self, connection: Connection, bucket: torch.Tensor) -> None:
            super().send_bucket(connection, bucket)
            if bucket.numel() < BUCKET:  # the last one
                compared.wait(60)

    monkeypatch.setitem(TRANSPORTS, "tcp", lambda device: Held())
    registry = BufferRegistry()
    registry.put("s/0", torch.ones(NUM_BYTES, dtype=torch.uint8))
    source_server = SourceServer(registry, secret="x", host="127.0.0.1")
    receivers = [
        Receiver(
            index=index,
            host="127.0.0.1",
            secret="x",
            device=torch.device("cpu"),
            allocate=lambda size: torch.zeros(size, dtype=torch.uint8),
            prepare=lambda layout, buffer: None,
        )
        for index in range(4)
    ]
    request = WeightUpdateRequest(
        sender="s",
        version=0,
        params=(ParamSpec("w", "uint8", (NUM_BYTES,)),),
        workers=((PayloadRange(start=0, end=NUM_BYTES, sources=(source_server.address,)),),) * len(receivers),
        transport="tcp",
        bucket_bytes=BUCKET,
        timeout_s=60,
        stall_s=60,
    )
    try:
        for transfer in [receiver.begin(request) for receiver in receivers]:
            assert isinstance(transfer.reply(60), Staged), transfer.end
        assert source_server.num_bytes == len(receivers) * NUM_BYTES
    finally:
        compared.set()
        for receiver in receivers:
            receiver.close()
        source_server.close()
