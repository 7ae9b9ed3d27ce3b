"""A judge as a server of the run, and the question to one of them."""

import random
from collections.abc import Callable
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from omegaconf import DictConfig

from pipelinerl.utils import get_environment_jobs, resolve_environment_key


def serve(port: int, judge: Callable[[dict], Any]) -> None:
    app = FastAPI()

    @app.post("/verify_answer")
    async def verify(request: dict):
        return JSONResponse(content=judge(request))

    @app.get("/health")
    async def health():
        return JSONResponse(content={"status": "ok"})

    uvicorn.run(app, host="0.0.0.0", port=port, timeout_keep_alive=60, log_level="warning")


async def ask(cfg: DictConfig, session: aiohttp.ClientSession, key: str, body: dict) -> Any:
    env_jobs = get_environment_jobs(cfg, resolve_environment_key(cfg, default=key))
    if not env_jobs:
        raise RuntimeError(f"No environment servers available for {key} domain")
    env_job = random.choice(env_jobs)
    assert env_job.port is not None
    async with session.post(f"http://{env_job.hostname}:{env_job.port}/verify_answer", json=body) as response:
        response.raise_for_status()
        return await response.json()
