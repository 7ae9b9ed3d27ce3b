"""Runs the agent against the recording endpoint and rewards what it submitted, like the domain `largest`."""

from typing import Any

import aiohttp
from omegaconf import DictConfig
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from pipelinerl.agents import record_agent
from pipelinerl.domains.largest_agent.agent import answer_question
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    # On loopback there is no TLS to verify; making the default TLS context would cost more than the rollout.
    async with record_agent(llm, session) as agent, DefaultAsyncHttpxClient(verify=False) as http:
        client = AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, http_client=http, max_retries=0)
        number = await answer_question(client, problem["question"])
        success = number == problem["answer"]
        reward = -1.0 if number is None else float(success)
        return agent.result(
            reward=reward, success=success, no_answer=number is None, dataset_name=problem.get("dataset")
        )
