"""A server without vLLM: real HTTP, real Gloo, real receiver; the model is the last swapped copy of the bytes."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import uvicorn
from fastapi import FastAPI

from pipelinerl.errors import WeightUpdateError
from pipelinerl.inference.control import WeightUpdates, build_router
from pipelinerl.inference.guard import Guard
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import WeightUpdateRequest
from pipelinerl.weights.receiver import Receiver
from pipelinerl.world import Job

SECRET = "unit-test-secret"


class ModelServer:
    """One worker behind our routes; records pauses, resumes and what is live."""

    def __init__(self, name: str = "actor_llm_0", refuse: Callable[[Layout], None] | None = None):
        self.live: dict[str, torch.Tensor] = {}
        self.label = "default"
        self.paused = False
        self.swaps = 0
        self.fatal = 0
        self._refuse = refuse or (lambda layout: None)
        self.receiver = Receiver(
            rank=1, device=torch.device("cpu"), allocate=self._allocate, prepare=lambda layout, _: self._refuse(layout)
        )
        app = FastAPI()
        app.include_router(build_router(WeightUpdates(self, num_workers=1, on_fatal=self._on_fatal)))
        app.add_middleware(Guard)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=asyncio.run, args=(self._server.serve(),), daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.job = Job(name=name, kind="actor_llm", port=self.port, url=f"http://127.0.0.1:{self.port}")

    @staticmethod
    def _allocate(num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def _on_fatal(self) -> None:
        self.fatal += 1

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self, method)(*args)]

    def begin_weight_transfer(self, request: str) -> None:
        self.receiver.begin(msgspec.json.decode(request, type=WeightUpdateRequest))

    def weight_transfer_state(self) -> tuple[str, str, float, float]:
        transfer = self.receiver.transfer
        return transfer.state, transfer.error, transfer.transfer_ms, transfer.prepare_ms

    def abandon_weight_transfer(self) -> None:
        self.receiver.abandon()

    def swap_weights(self, version: int) -> None:
        assert self.paused
        layout, buffer = self.receiver.staged()
        self.live = {name: tensor.clone() for name, tensor in layout.views(buffer)}
        self.swaps += 1

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def set_version(self, version: str) -> None:
        assert self.paused
        self.label = version

    async def version(self) -> str:
        return self.label

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self.receiver.abandon()


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def refuse_all(layout: Layout) -> None:
    raise WeightUpdateError(f"the model does not know {layout.specs[0].name}")


@pytest.fixture
def start_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModelServer]]:
    monkeypatch.setenv("PIPELINERL_SECRET", SECRET)
    servers: list[ModelServer] = []

    def start(*args: Any, **kwargs: Any) -> ModelServer:
        servers.append(ModelServer(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
