"""Tasks on a page: an agent of tapeagents, whose steps a server of the domain carries out."""

import asyncio
import json
import os
import random
import time
from typing import Any

import aiohttp
from hydra.utils import instantiate
from omegaconf import DictConfig
from tapeagents.agent import DEFAULT, Agent, Node
from tapeagents.core import Action, LLMOutputParsingFailureAction, Observation, Tape
from tapeagents.io import save_json_tape
from tapeagents.orchestrator import async_execute_agent
from tapeagents.remote_environment import AsyncRemoteEnvironment, serve_environment
from tapeagents.tools.simple_browser import PageObservation

from pipelinerl.async_llm import make_training_texts_from_llm_calls
from pipelinerl.llm import LLMCall, LLMStream, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult, summarize_training_texts
from pipelinerl.world import Job


class ClickAction(Action):
    bid: str


class WebNode(Node):
    guidance: str = ""

    def make_prompt(self, agent: Any, tape: Tape):
        pages = [step.text for step in tape.steps if isinstance(step, PageObservation)]
        return Prompt(messages=[{"role": "user", "content": f"{pages[-1]} {self.guidance}"}])

    def generate_steps(self, agent: Any, tape: Tape, llm_stream: LLMStream):
        try:
            yield ClickAction(bid=str(json.loads(llm_stream.get_output().content or "")["bid"]))
        except (ValueError, KeyError, TypeError):
            yield LLMOutputParsingFailureAction(error="no click")


class WebEnvironmentServer:
    """A page with ten buttons. The third one is right."""

    def __init__(self, n_envs: int, headless: bool = True):
        self.n_envs = n_envs

    def launch(self, port: int):
        def start(task: dict) -> dict:
            return {"text": task["task"]}

        def step(action: dict) -> dict:
            right = action.get("bid") == "3"
            return {"text": "done" if right else "nothing happens", "reward": float(right)}

        serve_environment(port, start, step)


class WebMetrics(BaseMetrics):
    overflow: bool
    n_llm_calls: int
    n_step_errors: int


async def is_healthy(env_job: Job, session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get(f"http://{env_job.hostname}:{env_job.port}/health", timeout=5) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def generate_web_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    start_time = time.time()
    env_jobs = [Job(**job) for job in cfg.jobs if job["kind"] == "environment"]
    random.shuffle(env_jobs)
    for env_job in env_jobs:  # of a run of several domains, most serve something else
        if not await is_healthy(env_job, session):
            continue
        try:
            url = f"http://{env_job.hostname}:{env_job.port}"
            return await asyncio.wait_for(_rollout(cfg, llm, problem, session, start_time, url), timeout=60)
        except aiohttp.ClientError:
            continue
    raise RuntimeError("All environment servers failed")


async def _rollout(cfg, llm, problem, session, start_time: float, url: str) -> RolloutResult:
    environment = AsyncRemoteEnvironment(server_url=url)
    async with environment.acontext(session, wait_for_env=True) as env:
        tape_dict, info = await env.start_task(problem)
        assert not info.get("error")
        tape = Tape(steps=[PageObservation(**step) for step in tape_dict["steps"]])
        agent: Agent = instantiate(
            cfg.agent, known_actions=await env.a_actions(), tools_description=await env.a_tools_description()
        )
        agent.llms = {DEFAULT: llm}
        tape = await async_execute_agent(agent, tape, env, session, max_loops=cfg.agent_max_loops)
        if tape.metadata.error:
            raise ValueError(tape.metadata.error)
    if cfg.save_tapes:
        save_json_tape(tape, os.path.join(cfg.output_dir, "tapes"), tape.metadata.id)
    rewards = [step.reward for step in tape.steps if isinstance(step, Observation)]
    errors = sum(isinstance(step, LLMOutputParsingFailureAction) for step in tape.steps)
    reward = rewards[-1] * 0.99**errors if cfg.reward_computation == "nico" else float(rewards[-1] > 0)
    llm_calls: list[LLMCall] = [
        step.metadata.other["llm_call"] for step in tape.steps if step.metadata.other.get("llm_call") is not None
    ]
    training_texts = make_training_texts_from_llm_calls(llm, llm_calls, reward=reward)
    metrics = WebMetrics(
        reward=reward,
        success=reward > 0.5,
        no_error=not errors,
        no_answer=reward <= 0,
        overflow=summarize_training_texts(training_texts).overflow,
        n_llm_calls=len(llm_calls),
        n_step_errors=errors,
    )
    return RolloutResult(training_texts=training_texts, metrics=metrics, latency=time.time() - start_time, domain="web")


def load_tasks(dataset_names: list[str], train_split: float = 0.6, seeds: tuple[int, ...] = (0,)) -> list[dict]:
    return [{"dataset": name, "task": "Ten buttons.", "seed": seed} for name in dataset_names for seed in seeds]
