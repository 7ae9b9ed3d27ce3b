"""Strangers on every port that a run opens: whatever bytes they send has no effect, and the service stays.

Each service is the run's own, listening on loopback. Inputs are valid conversations of its protocol without the secret,
mutated, and random bytes. vLLM's own routes behind it are stood in for by a handler that counts its calls.
"""

import asyncio
import contextlib
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import torch.distributed as dist
import uvicorn
from fastapi import FastAPI

from pipelinerl.agents import record_agent
from pipelinerl.config.sections import VerifierSection
from pipelinerl.domains.verifier.app import create_app
from pipelinerl.domains.verifier.pool import JudgePool
from pipelinerl.finetune.rendezvous import SealedStore
from pipelinerl.inference.access import RouteAccess
from pipelinerl.streams.redis_server import await_redis, redis_client, redis_config, start_redis, stop_redis
from pipelinerl.testing import FakeLLM
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.source import SourceServer
from pipelinerl.weights.transfer.wire import Connection
from pipelinerl.world.network import find_port_block

SECRET = "the-secret-of-this-run"
INPUTS, MANY = 60, 1670
"""Per service: in every run of the tests, and so that all six get 10,000."""
ANSWER_S, DEADLINE_S = 0.1, 60.0
BODY = b'{"token_ids": [1, 2], "kind": "math", "messages": [{"role": "user", "content": "x"}]}'
HTTP = [
    b"%s %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (method, path, header, len(BODY), BODY)
    for method in (b"POST", b"GET", b"PUT")
    for path in (
        b"/pause",
        b"/v1/chat/completions",
        b"/tokenize",
        b"/answers",
        b"/",
        b"/batch",
        b"/receive_weight_update",
    )
    for header in (b"", b"Authorization: Bearer x\r\n", b"Authorization: \xff\r\n", b"Transfer-Encoding: chunked\r\n")
]
WIRE = [b"PRLW1" + bytes(32) + bytes(32), b"PRLW1" + bytes(31), b"PRLW1" + bytes(64) + b"\x01" + bytes(7) + b"\x02{}"]
REDIS = [
    *(b"AUTH wrong\r\nSET k v\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n", b"CONFIG SET requirepass ''\r\n"),
    *(b"FLUSHALL\r\nSHUTDOWN\r\n", b"EVAL \"return redis.call('set','k','v')\" 0\r\n", b"REPLICAOF 127.0.0.1 1\r\n"),
]
STORE = [b"\x00\xce\xf7\x85\x3c\x01\x00\x00\x00", b"\x01" + bytes(8) + b"k" + bytes(8), bytes(range(20))]


@dataclass
class Service:
    """A listening part of a run."""

    port: int
    seeds: list[bytes]
    effects: Callable[[], int]
    """How much strangers have achieved."""
    lives: Callable[[], bool]
    """Whether it serves those who know the secret."""


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post(port: int, path: str, token: str) -> int:
    """The status of an honest request."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stream:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n"
        stream.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        return int(stream.makefile("rb").readline().split()[1])


def counting(port: int, handled: Sequence[Any], answers_honest: Callable[[], bool]) -> Service:
    """A service over HTTP that handles what gets through: each honest request once, and nothing of strangers."""
    honest = 0

    def lives() -> bool:
        nonlocal honest
        honest += 1
        return answers_honest()

    return Service(port, HTTP, lambda: len(handled) - honest, lives)


@contextlib.contextmanager
def looping(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Runs ``main`` in an event loop of its own until the block ends, which sets its event."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main(stop)))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextlib.contextmanager
def served(app: Any) -> Iterator[int]:
    port = find_port_block("127.0.0.1", 1)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, access_log=False))

    async def main(stop: asyncio.Event) -> None:
        serving = asyncio.create_task(server._serve())
        await stop.wait()
        server.should_exit = True
        await serving

    with looping(main):
        wait_until(lambda: server.started)
        yield port


@contextlib.contextmanager
def inference_server(_: Path) -> Iterator[Service]:
    handled: list[str] = []
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def anything(path: str) -> None:
        if path not in ("health", "ping"):
            handled.append(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINERL_SECRET", SECRET)
        patch.setenv("PIPELINERL_STRANGERS", "1")
        guarded = RouteAccess(app)
    with served(guarded) as port:
        yield counting(port, handled, lambda: post(port, "/pause", SECRET) == 200)


@contextlib.contextmanager
def verifier(_: Path) -> Iterator[Service]:
    judged: list[Any] = []
    judge = JudgePool.judge

    async def counted(self: JudgePool, check: Any) -> Any:
        judged.append(check)
        return await judge(self, check)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JudgePool, "judge", counted)
        settings = VerifierSection(workers=1, timeout_s=5.0, memory_mb=512, max_body_kb=64, judges=[])
        app = create_app(settings, secret=SECRET)
        with served(app) as port:
            yield Service(port, HTTP, lambda: len(judged), lambda: post(port, "/", SECRET) == 422)


@contextlib.contextmanager
def agents_endpoint(_: Path) -> Iterator[Service]:
    asked: list[Any] = []
    ready: list[tuple[int, str]] = []
    llm = FakeLLM.saying(lambda prompt: str(asked.append(prompt)), parameters={"max_tokens": 8})

    async def main(stop: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session, record_agent(llm, session) as agent:
            ready.append((int(agent.base_url.split(":")[2].split("/")[0]), agent.api_key))
            await stop.wait()

    with looping(main):
        wait_until(lambda: ready)
        port, key = ready[0]
        yield counting(port, asked, lambda: post(port, "/v1/chat/completions", key) == 200)


@contextlib.contextmanager
def weights_source(_: Path) -> Iterator[Service]:
    registry, taken = BufferRegistry(), []
    registry.put("step_1", torch.zeros(100, dtype=torch.uint8))
    source_server = SourceServer(registry, secret=SECRET, host="127.0.0.1", on_order=lambda order: taken.append(order))  # type: ignore[arg-type,return-value]

    def lives() -> bool:
        Connection.dial(source_server.address, SECRET, DEADLINE_S).close()
        return True

    try:
        yield Service(source_server.address.port, WIRE, lambda: len(taken) + source_server.num_bytes, lives)
    finally:
        source_server.close()


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[Service]:
    if not shutil.which("redis-server"):
        pytest.skip("needs redis-server")
    port = find_port_block("127.0.0.1", 1)
    config = redis_config(port=port, data_dir=folder, password=SECRET, address=None, fsync="never", max_record_mb=64)
    process = start_redis(config)
    try:
        await_redis(process, port, SECRET)
        with redis_client(port, SECRET) as client:
            yield Service(port, REDIS, lambda: int(client.dbsize()), lambda: bool(client.ping()))  # type: ignore[arg-type]
    finally:
        stop_redis(process)


@contextlib.contextmanager
def ranks_store(_: Path) -> Iterator[Service]:
    port = find_port_block("127.0.0.1", 1)
    listener = socket.create_server(("127.0.0.1", port)).detach()
    timeout = timedelta(seconds=DEADLINE_S)
    inner = dist.TCPStore("127.0.0.1", port, 2, True, timeout, wait_for_workers=False, master_listen_fd=listener)
    store = SealedStore(inner, SECRET.encode())
    store.set("address", "rank 0")

    def lives() -> bool:
        store.set("honest", "value")
        return store.get("honest") == b"value"

    yield Service(port, STORE, lambda: int(store.get("address") != b"rank 0"), lives)


SERVICES = [inference_server, verifier, agents_endpoint, weights_source, redis_server, ranks_store]


def inputs(seeds: list[bytes], count: int) -> Iterator[bytes]:
    """Conversations of strangers: mutated ones of ``seeds`` and random bytes."""
    rng = random.Random(13)
    for _ in range(count):
        if rng.random() < 0.1:
            yield rng.randbytes(rng.randrange(1, 300))
            continue
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            at = rng.randrange(len(data) + 1)
            end = min(at + rng.randrange(8), len(data))
            data[at:end] = rng.choice((b"", rng.randbytes(4), bytes(data[at:end]) * 3, b"\r\n", b"\xff\xff\xff\xff"))
        yield bytes(data)


def send(port: int, data: bytes) -> None:
    """Sends, and reads answers until there are none for a moment."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stream:
        stream.settimeout(ANSWER_S)
        stream.sendall(data)
        while stream.recv(65536):
            pass


@pytest.mark.parametrize("count", [INPUTS, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("open_service", SERVICES, ids=lambda service: service.__name__)
def test_what_strangers_send_has_no_effect(open_service: Any, count: int, tmp_path: Path):
    with open_service(tmp_path) as service, ThreadPoolExecutor(16) as strangers:
        assert service.lives()
        for sent in [strangers.submit(send, service.port, data) for data in inputs(service.seeds, count)]:
            sent.result()
        assert service.lives()
        assert service.effects() == 0
