"""PipelineRL's counting of letters: a thousand words to train, a thousand to test, reward 1 for the right number."""

import re
import time
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

NAMES = ("train_counting_problems", "test_counting_problems")
# The next two texts are quoted from ServiceNow/PipelineRL, Copyright 2024 ServiceNow, Inc., Apache License 2.0.
SYSTEM = "You are a helpful assistant"
QUESTION = (
    "How many {letter}'s are there in the word '{word}'? You can think step by step. "
    "Output the answer as <answer>number</answer>."
)
ANSWER = re.compile(r"<answer>(\d{1,4300})</answer>")
"""Python reads no longer numbers."""

required_problem_keys = ("letter", "word", "count")


def load_problems(dataset_names: list[str]) -> list[dict[str, Any]]:
    """Returns the problems of `train_counting_problems`, of `test_counting_problems`, or of both."""
    problems = []
    for name in dataset_names:
        if name not in NAMES:
            raise DomainError(f"PipelineRL's counting has no data set {name!r}: use one of {', '.join(NAMES)}")
        lines = (Path(__file__).parent / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        for word, letter in (line.split(",") for line in lines if not line.startswith("#")):
            problems.append(
                {"word": word, "letter": letter, "count": word.count(letter), "dataset": name, "domain": "counting"}
            )
    return problems


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Judges the first number in tags."""
    started = time.monotonic()
    question = QUESTION.format(letter=problem["letter"], word=problem["word"])
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    call = await llm_async_generate(llm, Prompt(messages=asked), session)
    found = ANSWER.search(call.output.content or "")
    right = found is not None and int(found[1]) == problem["count"]
    text = make_training_text(llm, call)
    text.reward = float(right)
    return RolloutResult(
        training_texts=[text],
        metrics=BaseMetrics(reward=text.reward, success=right, no_error=bool(found), no_answer=not found),
        latency=time.monotonic() - started,
        dataset_name=problem["dataset"],
        domain="counting",
    )
