"""One task, one answer, judged on its form; the share of constraints that hold is partial credit."""

import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.instructions.judge import judge
from pipelinerl.domains.rewards import RewardTable
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.verifier.client import judged

required_problem_keys = ("task", "constraints")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    started = time.monotonic()
    llm_call = await llm_async_generate(llm, Prompt.from_user_message(problem["task"]), session)
    verdict = judged(judge(llm_call.output.content or "", problem["constraints"], {}))
    text = make_training_text(llm, llm_call)
    metrics = RewardTable.of(cfg).metrics(verdict, finished=text.finished)
    text.reward = metrics.reward
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
