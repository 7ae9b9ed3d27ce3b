"""Servers without a model, each a process of its own: real HTTP, connections and staging, an uplink with a rate.

Used by ``fan_out.py``, ``slow_server.py`` and by the campaign of faults in the tests.
"""

import asyncio
import hashlib
import multiprocessing
import multiprocessing.forkserver
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from pipelinerl.inference.weight_update import UpdateControl, control_router
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.world import Job

SECRET = "receivers"
BURST_S = 0.02


class Uplink:
    """A token bucket: all that a process sends (or receives) shares ``rate`` bytes per second. 0 = not limited."""

    def __init__(self, rate: float = 0.0):
        self.rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __call__(self, num_bytes: int) -> None:
        """Returns when the bytes have had their time on the wire."""
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + num_bytes / self.rate
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


class Model:
    """What a server would run: it remembers the digest of every version that went live."""

    def __init__(self, uplink: Uplink, downlink: Uplink):
        self.label, self.digests = "default", dict[str, str]()
        self.receiver = Receiver(
            index=0,
            host="127.0.0.1",
            secret=SECRET,
            device=torch.device("cpu"),
            allocate=lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
            prepare=lambda layout, buffer: None,
            pace=uplink,
            receive_pace=downlink,
        )

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        raise NotImplementedError(method)

    async def swap(self, version: int) -> tuple[float, float]:
        _, buffer = self.receiver.staged(version)
        self.label = str(version)
        self.digests[self.label] = hashlib.sha256(buffer.numpy()).hexdigest()
        return 0.0, 0.0

    async def version(self) -> str:
        return self.label


def serve(index: int, port: int, rate: float, pipe: Any) -> None:
    """The process: serves until it is killed, answers what it has done over ``pipe``."""
    torch.set_num_threads(1)
    uplink, downlink = Uplink(rate), Uplink()
    model = Model(uplink, downlink)
    app = FastAPI()
    app.include_router(
        control_router(UpdateControl(model, workers=[model.receiver.address], secret=SECRET, on_fatal=lambda: None))
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off"))

    def answer() -> None:
        while not server.started:
            time.sleep(0.01)
        pipe.send(server.servers[0].sockets[0].getsockname()[1])
        while True:
            try:
                command, value = pipe.recv()
            except EOFError:
                server.should_exit = True
                return
            if command == "rate":
                uplink.rate = value
            elif command == "downlink":
                downlink.rate = value
            threads = [thread.name for thread in threading.enumerate()]
            pipe.send((model.receiver.source_server.num_bytes, model.digests, threads))

    threading.Thread(target=answer, daemon=True).start()
    asyncio.run(server.serve())


@dataclass(eq=False)
class ReceiverProcess:
    """One of them, seen from outside."""

    index: int
    process: Any
    pipe: Any
    port: int

    @property
    def job(self) -> Job:
        name, url = f"actor_llm_{self.index}", f"http://127.0.0.1:{self.port}"
        return Job(name=name, kind="actor_llm", replica_idx=self.index, port=self.port, url=url)

    def ask(self, command: str = "state", value: float = 0.0) -> tuple[int, dict[str, str], list[str]]:
        """(bytes given to others, version → digest of what went live, names of its threads)."""
        self.pipe.send((command, value))
        assert self.pipe.poll(60), f"receiver {self.index} does not answer"
        return self.pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def start(indices: Sequence[int], *, rate: float = 0.0, port: int = 0) -> list[ReceiverProcess]:
    """Processes that are ready, within ``forkserver``."""
    context = multiprocessing.get_context("forkserver")
    started = []
    for index in indices:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(index, port, rate, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((index, process, ours))
    made = []
    for index, process, ours in started:
        assert ours.poll(120), f"receiver {index} did not start"
        made.append(ReceiverProcess(index, process, ours, ours.recv()))
    return made


@contextmanager
def forkserver(module: str = __name__) -> Iterator[None]:
    """The process from which receivers are forked, or those whose code is in another ``module``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]  # it has no public end
    server.ensure_running()
    try:
        yield
    finally:
        server._stop()  # type: ignore[attr-defined]


@contextmanager
def receivers(count: int, *, rate: float = 0.0, first: int = 0) -> Iterator[list[ReceiverProcess]]:
    """``first``: number of the first one, which its name tells."""
    running = start(range(first, first + count), rate=rate)
    try:
        yield running
    finally:
        for one in running:
            one.end()
