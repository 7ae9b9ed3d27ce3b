import re
import time

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

DOMAIN = "counting"


def question(problem: dict) -> list[dict]:
    text = f"How many {problem['letter']}'s are in '{problem['word']}'? Write <answer>number</answer>."
    return [{"role": "user", "content": text}]


def grade(problem: dict, said: str | None) -> tuple[int, int]:
    """(reward, error)"""
    found = re.search(r"<answer>(\d+)</answer>", said or "")
    return (0, 1) if found is None else (int(int(found.group(1)) == problem["count"]), 0)


async def generate_counting_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    time_start = time.time()
    llm_call = await llm_async_generate(llm, Prompt(messages=question(problem)), session)
    latency = time.time() - time_start
    reward, error = grade(problem, llm_call.output.content)
    training_text = make_training_text(llm, llm_call)
    training_text.reward = reward
    return RolloutResult(
        training_texts=[training_text],
        metrics=BaseMetrics(reward=reward, success=reward, no_error=not error, no_answer=error),
        latency=latency,
        dataset_name=problem["dataset"],
        domain=DOMAIN,
    )


def load_problems(dataset_names: list[str]) -> list[dict]:
    problems = []
    for name in dataset_names:
        for word, letter in (("banana", "a"), ("letter", "t")):
            problems.append({"word": word, "letter": letter, "count": word.count(letter), "dataset": name})
            problems[-1].setdefault("domain", DOMAIN)
    return problems
