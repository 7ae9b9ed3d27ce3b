"""PipelineRL's guessing game: 1 … 1024 in at most 13 turns. Its training numbers are odd, its test numbers even.

Every turn is a conversation of its own, which lists the guesses so far. So every turn is a training sequence, and
advantages compare the turns of the same step.
"""

import re
import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_texts_from_llm_calls
from pipelinerl.errors import DomainError
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

MAX_NUMBER, MAX_TURNS, FACTOR = 1024, 13, 191
"""The rules of PipelineRL's game. The factor shuffles the numbers, modulo `MAX_NUMBER`."""
# The next four texts are quoted from ServiceNow/PipelineRL, Copyright 2024 ServiceNow, Inc., Apache License 2.0.
SYSTEM = "You are a helpful assistant"
QUESTION = (
    "You must guess a number between 1 and 1024. Output the answer as <answer>number</answer>."
    " After each guess I will tell you if your answer is higher or lower than the target number."
)
HISTORY = "Your {turn} previous guesses:{lines}\n<wrong output>"
LINE = "\n{guess}, which is {relation} than the target number."
ANSWER = re.compile(r"<answer>(\d{1,4300})</answer>")
"""Python reads no longer numbers."""

required_problem_keys = ("answer",)


def load_problems(dataset_names: list[str]) -> list[dict[str, Any]]:
    """Returns the 512 problems of `train`, of `test`, or of both."""
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(f"PipelineRL's guessing game has no data set {name!r}: use `train` or `test`")
        numbers = range(0 if name == "train" else 1, MAX_NUMBER, 2)
        problems += [
            {"answer": number * FACTOR % MAX_NUMBER + 1, "dataset": name, "domain": "guessing"} for number in numbers
        ]
    return problems


def messages(guesses: list[int], answer: int) -> list[dict[str, Any]]:
    """Returns the conversation of the turn after ``guesses``, which were all wrong."""
    asked: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    if guesses:
        lines = "".join(LINE.format(guess=g, relation="lower" if g < answer else "higher") for g in guesses)
        asked.append({"role": "user", "content": HISTORY.format(turn=len(guesses), lines=lines)})
    return asked


async def play(
    llm: TrainableLLM, answer: int, session: aiohttp.ClientSession
) -> tuple[list[LLMCall], float, bool, bool]:
    """Plays one game. Returns its calls, its reward, whether it was won, and whether the last output had no guess."""
    calls: list[LLMCall] = []
    guesses: list[int] = []
    for turn in range(MAX_TURNS):
        calls.append(await llm_async_generate(llm, Prompt(messages=messages(guesses, answer)), session))
        found = ANSWER.search(calls[-1].output.content or "")
        if found is None:
            return calls, -2 + turn / 10, False, True
        if int(found[1]) == answer:
            return calls, 2 - turn / 10, True, False
        guesses.append(int(found[1]))
    return calls, 0.0, False, False


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    started = time.monotonic()
    calls, reward, won, broken = await play(llm, problem["answer"], session)
    return RolloutResult(
        training_texts=make_training_texts_from_llm_calls(llm, calls, reward),
        metrics=BaseMetrics(reward=reward, success=won, no_error=not broken, no_answer=broken),
        latency=time.monotonic() - started,
        dataset_name=problem["dataset"],
        domain="guessing",
        rewards="texts",
    )
