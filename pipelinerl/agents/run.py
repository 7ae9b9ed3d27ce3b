"""Run an agent around its recording endpoint: a Python function, sync or async, or a program of its own."""

import asyncio
import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from pipelinerl.agents.endpoint import RecordedAgent, record_agent
from pipelinerl.agents.threads import in_thread
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

Score = Callable[[Any], tuple[float, bool]]
"""What the agent returned → (reward, success)."""


async def run_agent(
    llm: TrainableLLM,
    session: aiohttp.ClientSession,
    agent: Callable[[str, str], Any],
    score: Score,
    *,
    dataset_name: str | None = None,
) -> RolloutResult:
    """Run ``agent(base_url, api_key)`` and reward what it returns.

    A coroutine function runs on this loop; a plain function runs in a thread, so a synchronous client works too.
    """
    async with record_agent(llm, session) as recorded:
        if inspect.iscoroutinefunction(agent):
            answer = await agent(recorded.base_url, recorded.api_key)
        else:
            answer = await in_thread(agent, recorded.base_url, recorded.api_key)
        return _rewarded(recorded, answer, score, dataset_name)


async def run_agent_process(
    llm: TrainableLLM,
    session: aiohttp.ClientSession,
    command: Sequence[str],
    score: Callable[[str], tuple[float, bool]],
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    dataset_name: str | None = None,
) -> RolloutResult:
    """Run a program that reads `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and reward what it prints.

    The program gets its own process group, killed with the rollout, and none of the run's secrets. The rollout ends
    when nothing holds the program's output open any more.
    Raises ``DomainError`` when it ends with a non-zero status.
    """
    async with record_agent(llm, session) as recorded:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=agent_environment(os.environ, recorded, env or {}),
            start_new_session=True,
        )
        try:
            out, err = await process.communicate(stdin.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode and recorded.failure is None:
            message = err.decode(errors="replace")[-500:]
            raise DomainError(f"{command[0]} ended with status {process.returncode}: {message}")
        return _rewarded(recorded, out.decode(errors="replace"), score, dataset_name)


def agent_environment(ours: Mapping[str, str], recorded: RecordedAgent, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of an agent's process: ours without secrets, plus where to find the policy."""
    clean = {name: value for name, value in ours.items() if not name.startswith("PIPELINERL_")}
    return clean | {"OPENAI_BASE_URL": recorded.base_url, "OPENAI_API_KEY": recorded.api_key} | dict(extra)


def _rewarded(recorded: RecordedAgent, answer: Any, score: Score, dataset_name: str | None) -> RolloutResult:
    reward, success = score(answer) if recorded.failure is None else (0.0, False)
    return recorded.result(reward=reward, success=success, dataset_name=dataset_name)
