"""What a receiver does with the transfer under way when the next request comes."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import ParamSpec
from pipelinerl.weights.protocol import STALE, Failed, PayloadRange, Staged, WeightUpdateRequest
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.delta import encode_delta
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.source import SourceServer

SIZE = 1 << 18
OLD, NEW = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
NEW[7] = 1


class Pair:
    """A source and a receiver, which calls ``learn`` before bytes come."""

    def __init__(self) -> None:
        self.registry = BufferRegistry()
        self.source = SourceServer(self.registry, secret="x", host="127.0.0.1")
        self.may_learn, self.learns = threading.Event(), threading.Event()
        self.may_learn.set()
        self.receiver = Receiver(
            index=0,
            host="127.0.0.1",
            secret="x",
            device=torch.device("cpu"),
            allocate=lambda size: torch.zeros(size, dtype=torch.uint8),
            prepare=lambda layout, buffer: None,
            learn=self.learn,
        )

    def learn(self, *_: Any) -> None:
        self.learns.set()
        assert self.may_learn.wait(60)

    def request(self, version: int, end: int = SIZE, base: int | None = None) -> WeightUpdateRequest:
        return WeightUpdateRequest(
            sender="s",
            version=version,
            params=(ParamSpec("w", "uint8", (SIZE,)),),
            workers=((PayloadRange(start=0, end=end, sources=(self.source.address,)),),),
            transport="tcp",
            bucket_bytes=SIZE,
            timeout_s=60,
            stall_s=60,
            base_version=base,
        )

    def close(self) -> None:
        self.receiver.close()
        self.source.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.closing(Pair()) as pair:
        yield pair


@pytest.mark.parametrize("held", [None, 0], ids=["nothing_held", "another_base_held"])
def test_delta_that_is_refused_leaves_the_transfer_under_way_alone(pair: Pair, held: int | None) -> None:
    if held is not None:
        pair.registry.put("s/0", OLD)
        assert isinstance(pair.receiver.begin(pair.request(0)).reply(60), Staged)
    under_way = pair.receiver.begin(pair.request(1))
    with pytest.raises(WeightUpdateError, match=f"{STALE} base: the delta is against 5"):
        pair.receiver.begin(pair.request(6, end=8, base=5))
    pair.registry.put("s/1", NEW)
    assert isinstance(under_way.reply(60), Staged), under_way.end
    assert torch.equal(pair.receiver.staged(1)[1], NEW)


def test_delta_whose_base_the_transfer_before_replaces_meanwhile_is_refused(pair: Pair) -> None:
    pair.registry.put("s/0", OLD)
    assert isinstance(pair.receiver.begin(pair.request(0)).reply(60), Staged)
    pair.may_learn.clear()
    pair.learns.clear()
    pair.receiver.begin(pair.request(1))
    assert pair.learns.wait(60)
    payload = encode_delta(OLD, NEW)
    assert payload is not None
    delta = pair.request(2, end=payload.numel(), base=0)
    pair.registry.put(delta.payload_key, payload)
    late = pair.receiver.begin(delta)
    pair.may_learn.set()
    end = late.reply(60)
    assert isinstance(end, Failed), end
    assert f"{STALE} base: the delta is against 0" in end.error


@pytest.mark.parametrize("thread", ["weight-receiver", "weight-puller", "weight-source"])
def test_limit_of_threads_fails_one_transfer_and_not_the_next(
    pair: Pair, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = (
        PayloadRange(start=start, end=start + SIZE // 2, sources=(pair.source.address,)) for start in (0, SIZE // 2)
    )
    request = msgspec.structs.replace(pair.request(1), workers=(tuple(half),), timeout_s=20)
    pair.registry.put("s/1", NEW)
    start = threading.Thread.start

    def limited(one: threading.Thread) -> None:
        if one.name == thread:
            raise RuntimeError("can't start new thread")
        start(one)

    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", limited)
        try:
            end = pair.receiver.begin(request).reply(60)
        except RuntimeError:
            end = None
    assert not isinstance(end, Staged)
    assert isinstance(pair.receiver.begin(request).reply(60), Staged)
    assert torch.equal(pair.receiver.staged(1)[1], NEW)
