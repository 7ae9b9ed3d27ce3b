"""The quickstart's domain judged by the verifier, so that a run has one to lose. Used by `recovery.py`."""

import re
import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.largest import load_problems, score
from pipelinerl.domains.verifier_client import client_of
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

__all__ = ["generate_rollout", "load_problems"]


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Rewards are those of `largest`: the largest number is the countdown whose target is the largest number."""
    started = time.monotonic()
    llm_call = await llm_async_generate(llm, Prompt.from_user_message(problem["question"]), session)
    answer = llm_call.output.content or ""
    well_formed = score(answer, problem["answer"]).no_error
    gold = {"numbers": [int(n) for n in re.findall(r"\d+", problem["question"])], "target": problem["answer"]}
    verdict = await client_of(cfg).check(session, "countdown", answer, gold, use_all=False)
    success = well_formed and verdict.status == "correct"
    text = make_training_text(llm, llm_call)
    text.reward = float(success) if well_formed else -1.0
    metrics = BaseMetrics(reward=text.reward, success=success, no_error=well_formed, no_answer=not well_formed)
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
