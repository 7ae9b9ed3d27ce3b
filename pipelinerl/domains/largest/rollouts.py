"""One question, one answer: reward 1 for the largest number, 0 for another one, −1 for a broken format."""

import re
import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

required_problem_keys = ("question", "answer")
ANSWER = re.compile(r"\s*<answer>([0-9]{1,18})</answer>\s*")


def score(text: str, answer: int) -> BaseMetrics:
    """Judges a completion. Only an answer in tags without any other text is well formed."""
    match = ANSWER.fullmatch(text)
    success = match is not None and int(match[1]) == answer
    reward = -1.0 if match is None else float(success)
    return BaseMetrics(reward=reward, success=success, no_error=match is not None, no_answer=match is None)


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    started = time.monotonic()
    prompt = Prompt(messages=[{"role": "user", "content": problem["question"]}])
    llm_call = await llm_async_generate(llm, prompt, session)
    metrics = score(llm_call.output.content or "", problem["answer"])
    text = make_training_text(llm, llm_call)
    text.reward = metrics.reward
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
