import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI

from tapeagents.tools.simple_browser import PageObservation


def serve_environment(port: int, start: Callable[[dict], dict], step: Callable[[dict], dict]) -> None:
    app = FastAPI()
    app.get("/health")(lambda: {"status": "ok"})
    app.post("/start_task")(_json(start))
    app.post("/step")(_json(step))
    uvicorn.run(app, host="0.0.0.0", port=port, log_level="warning")


def _json(function: Callable[[dict], dict]) -> Callable[..., Any]:
    async def route(body: dict) -> dict:
        return function(body)

    return route


class AsyncRemoteEnvironment:
    """The environment of a server."""

    def __init__(self, server_url: str):
        self._url = server_url
        self._session: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def acontext(
        self, session: aiohttp.ClientSession, wait_for_env: bool = False
    ) -> AsyncIterator["AsyncRemoteEnvironment"]:
        self._session = session
        yield self

    async def _ask(self, route: str, body: dict) -> dict:
        async with self._session.post(f"{self._url}/{route}", json=body) as response:
            response.raise_for_status()
            return await response.json()

    async def start_task(self, task: dict) -> tuple[dict, dict]:
        return {"steps": [await self._ask("start_task", task)]}, {}

    async def a_actions(self) -> list[Any]:
        return ["ClickAction"]

    async def a_tools_description(self) -> str:
        return "click"

    async def astep(self, action: Any) -> Any:
        return PageObservation(**await self._ask("step", action.model_dump(include={"bid"})))
