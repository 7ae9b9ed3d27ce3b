"""One problem, one answer, judged by the verifier service."""

import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.rewards import RewardTable
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.verifier.client import client_of

required_problem_keys = ("task", "answer")

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """``cfg.environment``: ``system_prompt`` and ``answer_format`` (``boxed`` or ``any``)."""
    started = time.monotonic()
    settings = cfg.get("environment") or {}
    messages = [
        {"role": "system", "content": settings.get("system_prompt", SYSTEM_PROMPT)},
        {"role": "user", "content": problem["task"]},
    ]
    llm_call = await llm_async_generate(llm, Prompt(messages=messages), session)
    verdict = await client_of(cfg).check(
        session,
        "math",
        llm_call.output.content or "",
        problem["answer"],
        answer_format=settings.get("answer_format", "boxed"),
    )
    text = make_training_text(llm, llm_call)
    metrics = RewardTable.of(cfg).metrics(verdict, finished=text.finished)
    text.reward = metrics.reward
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
