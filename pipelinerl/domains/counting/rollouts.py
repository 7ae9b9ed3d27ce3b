"""One question, one number: reward 1 if it is right, else 0."""

import re
import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

required_problem_keys = ("word", "letter", "count")
ANSWER = re.compile(r"<answer>\s*([0-9]{1,9})\s*</answer>")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    started = time.monotonic()
    asked = (
        f"How often does the letter '{problem['letter']}' stand in '{problem['word']}'?"
        " Think step by step, then answer as <answer>number</answer>."
    )
    llm_call = await llm_async_generate(llm, Prompt.from_user_message(asked), session)
    answers = ANSWER.findall(llm_call.output.content or "")
    success = bool(answers) and int(answers[-1]) == problem["count"]
    text = make_training_text(llm, llm_call)
    text.reward = float(success)
    return RolloutResult(
        training_texts=[text],
        metrics=BaseMetrics(reward=text.reward, success=success, no_error=bool(answers), no_answer=not answers),
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
