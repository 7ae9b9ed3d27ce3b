"""The quickstart's domain, which misbehaves in all `WAYS` by turns once it is told to. Used by `recovery.py`.

It is told to by the folder `misbehaviour_of(run_dir)`, in which every way that was taken leaves a file.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains import largest
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

EVERY_S = 1.0
"""Least time between two of them, in which a worker that was lost is replaced."""


def misbehaviour_of(run_dir: Path) -> Path:
    return Path(f"{run_dir}.misbehave")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    result = await largest.generate_rollout(cfg, llm, problem, session)
    if problem["dataset"] == "train" and (way := take_way(misbehaviour_of(cfg.output_dir))):
        way(result)
    return result


def take_way(folder: Path) -> Callable[[RolloutResult], object] | None:
    """The next way to misbehave, for one rollout of all workers. None: not told to, too soon, or all were taken."""
    if not folder.is_dir():
        return None
    taken = sorted(folder.iterdir())
    if len(taken) == len(WAYS) or (taken and time.time() - taken[-1].stat().st_mtime < EVERY_S):
        return None
    name, way = list(WAYS.items())[len(taken)]
    try:
        (folder / f"{len(taken):02} {name}").touch(exist_ok=False)
    except FileExistsError:
        return None
    return way


def raising(error: BaseException) -> Callable[[RolloutResult], object]:
    def way(result: RolloutResult) -> None:
        raise error

    return way


def rewarding(reward: Any) -> Callable[[RolloutResult], object]:
    """The reward of the rollout and of its text, past their types."""

    def way(result: RolloutResult) -> None:
        for holder in (result.metrics, *result.training_texts):
            holder.__dict__["reward"] = reward

    return way


def leave(result: RolloutResult) -> None:
    os.chdir("/")
    os.environ.clear()


WAYS: dict[str, Callable[[RolloutResult], object]] = {
    **{
        type(error).__name__: raising(error)
        for error in (
            *(BaseException(), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError()),
            *(RecursionError(), MemoryError(), StopIteration(), ExceptionGroup("two", [OSError(), KeyError()])),
        )
    },
    "exit 0": lambda result: os._exit(0),
    "exit 3": lambda result: os._exit(3),
    "SIGSEGV": lambda result: os.kill(os.getpid(), signal.SIGSEGV),
    "descriptors closed": lambda result: os.closerange(3, 4096),
    "tasks cancelled": lambda result: [task.cancel() for task in asyncio.all_tasks()],
    "loop stopped": lambda result: asyncio.get_running_loop().stop(),
    "without environment": leave,
    **{
        f"reward {str(reward)[:8]}": rewarding(reward)
        for reward in (float("nan"), float("inf"), "text", None, {"reward": 1}, 1e300, 10**400, 1j, b"1")
    },
}
