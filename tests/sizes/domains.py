"""Domains of the size tests: long prompts, many texts, texts of any length without a server."""

import asyncio
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText

METRICS = BaseMetrics(reward=1, success=True, no_error=True, no_answer=False)


def load_problems(names: list[str], *, characters: int = 10, texts: int = 1, tokens: int = 0) -> list[dict[str, Any]]:
    """64 problems that say how large their prompts and results are."""
    return [{"question": f"{i:04d}" + "x" * (characters - 4), "texts": texts, "tokens": tokens} for i in range(64)]


async def ask(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """As many calls as the problem says, each a text of its own."""
    calls = [
        await llm_async_generate(llm, Prompt.from_user_message(f"{i:04d}{problem['question']}"), session)
        for i in range(problem["texts"])
    ]
    return RolloutResult(training_texts=[make_training_text(llm, c) for c in calls], metrics=METRICS, latency=0.0)


async def build(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """One text of the problem's tokens, all trained, made without a server."""
    await asyncio.sleep(0)
    ids = [7] * problem["tokens"]
    text = TrainingText(text="", n_predicted=0, input_ids=ids, labels=ids, logprobs=[-0.5] * len(ids))
    return RolloutResult(training_texts=[text], metrics=METRICS, latency=0.0)
