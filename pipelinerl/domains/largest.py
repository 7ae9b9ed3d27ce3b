"""Quickstart: name the largest of three numbers. Reward 1 for it, 0 for another one, −1 for a broken format.

Triples of distinct numbers whose sum is divisible by 5 are held out and appear only in ``test``.
"""

import re
import time
from collections.abc import Sequence
from itertools import permutations
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

HELD_OUT_DIVISOR = 5
"""One triple in this many is held out for ``test``."""


def question(numbers: Sequence[int]) -> str:
    first, second, third = numbers
    return f"Which is the largest of {first}, {second} and {third}?"


def is_test_triple(numbers: Sequence[int]) -> bool:
    """Whether a triple is held out from training. The order of its numbers does not matter."""
    return sum(numbers) % HELD_OUT_DIVISOR == 0


def load_problems(dataset_names: list[str], max_number: int = 30, num_test_problems: int = 512) -> list[dict[str, Any]]:
    """Makes the problems ``{"dataset", "question", "answer"}`` of the named parts.

    Args:
        dataset_names: any of ``train`` (every ordered triple that is not held out) and ``test``.
        max_number: numbers are drawn from 1 … max_number.
        num_test_problems: size of ``test``, a fixed sample of the held-out triples.
    """
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(f"domain `largest` has no dataset {name!r}: use `train` or `test`")
        held_out = name == "test"
        triples = [list(n) for n in permutations(range(1, max_number + 1), 3) if is_test_triple(n) == held_out]
        if held_out:
            triples = Random(0).sample(triples, min(num_test_problems, len(triples)))
        problems += [{"dataset": name, "question": question(n), "answer": max(n)} for n in triples]
    return problems


required_problem_keys = ("question", "answer")
ANSWER = re.compile(r"\s*<answer>([0-9]{1,18})</answer>\s*")


def score(text: str, answer: int) -> BaseMetrics:
    """Judges a completion. It must be an answer in tags, without any other text."""
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
