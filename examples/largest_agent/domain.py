"""Runs an agent against the recording endpoint and rewards its answer like the domain `largest`."""

import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig
from openai import AsyncOpenAI

from examples.largest_agent.agent import answer_question
from pipelinerl.agents import record_agent, run_agent_process
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

PROGRAM = Path(__file__).parent / "program.py"
PRINTED = re.compile(r"([0-9]{1,18})\s*")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs the agent that is a function with the official client."""
    async with record_agent(llm, session) as agent:
        client = AsyncOpenAI(
            base_url=agent.base_url, api_key=agent.api_key, http_client=agent.http_client, max_retries=0
        )
        number = await answer_question(client, problem["question"])
        reward, success = reward_of(number, problem["answer"])
        return agent.result(
            reward=reward, success=success, no_answer=number is None, dataset_name=problem.get("dataset")
        )


async def generate_program_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs the agent that is a program."""

    def judge(printed: str) -> tuple[float, bool]:
        number = PRINTED.fullmatch(printed)
        return reward_of(int(number[1]) if number else None, problem["answer"])

    command = [sys.executable, "-I", "-S", str(PROGRAM)]
    dataset = problem.get("dataset")
    return await run_agent_process(llm, session, command, judge, stdin=problem["question"], dataset_name=dataset)


def reward_of(number: int | None, answer: int) -> tuple[float, bool]:
    """Returns (reward, success) of the submitted number. None means that no number was submitted."""
    success = number == answer
    return -1.0 if number is None else float(success), success
