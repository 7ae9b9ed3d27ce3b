"""A game of many turns: guess a hidden number, and learn after each guess whether it is higher or lower.

A game is ONE growing conversation, so its turns extend each other into one training sequence.
"""

import re
import time
from random import Random
from typing import Any, Literal

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_texts_from_llm_calls
from pipelinerl.errors import DomainError
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

SMALL = 64
"""Up to this many numbers, train and test are the same: the policy learns the search, not the numbers."""
HELD_OUT_SHARE = 1 / 4
"""With more than ``SMALL`` numbers, these are held out for ``test``. They are drawn, always the same ones, for a policy
could learn that no multiple of four ever comes up."""


def numbers_of(part: str, max_number: int) -> list[int]:
    """Returns the numbers of ``train`` or ``test``, ascending."""
    numbers = range(1, max_number + 1)
    if max_number <= SMALL:
        return list(numbers)
    held_out = set(Random(0).sample(numbers, round(HELD_OUT_SHARE * max_number)))
    return [number for number in numbers if (number in held_out) == (part == "test")]


def load_problems(
    dataset_names: list[str], max_number: int = 1024, max_turns: int = 13, num_test_problems: int = 256
) -> list[dict[str, Any]]:
    """Makes the problems ``{"dataset", "answer", "max_number", "max_turns"}`` of the named parts.

    Args:
        dataset_names: any of ``train`` (each number once) and ``test`` (cycles through its numbers).
        max_number: the hidden number is one of 1 … max_number.
        max_turns: maximum number of guesses in a game.
        num_test_problems: size of ``test``.
    """
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(f"domain `guessing` has no dataset {name!r}: use `train` or `test`")
        numbers = numbers_of(name, max_number)
        if name == "test":
            numbers = [numbers[index % len(numbers)] for index in range(num_test_problems)]
        problems += [{"dataset": name, "answer": n, "max_number": max_number, "max_turns": max_turns} for n in numbers]
    return problems


ANSWER = re.compile(r"<answer>([0-9]{1,18})</answer>")

GameOutcome = Literal["hit", "broken", "missed"]


def instructions(max_number: int) -> str:
    return (
        f"Guess a number between 1 and {max_number}. Answer as <answer>number</answer>."
        " After each guess you hear whether the number is higher or lower."
    )


def feedback(guess: int, relation: str) -> str:
    """Returns the message after a guess. ``relation``: whether the hidden number is "higher" or "lower"."""
    return f"The number is {relation} than {guess}."


def parse_guess(text: str) -> int | None:
    """Returns the first guess in tags, or None."""
    match = ANSWER.search(text)
    return int(match[1]) if match else None


def final_reward(turn: int, outcome: GameOutcome) -> float:
    """Returns 2 − i/10 for a hit at turn i (from 0), −2 + i/10 for a broken format, and 0 if the turns ran out."""
    return {"hit": 2 - turn / 10, "broken": -2 + turn / 10, "missed": 0.0}[outcome]


class GuessingMetrics(BaseMetrics):
    num_guesses: int
    """Guesses made, including the last one."""


required_problem_keys = ("answer", "max_number", "max_turns")


async def play(
    llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> tuple[list[LLMCall], GameOutcome]:
    """Plays one game to its end. Returns the calls and the outcome."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instructions(problem["max_number"])}]
    calls: list[LLMCall] = []
    for _ in range(problem["max_turns"]):
        calls.append(await llm_async_generate(llm, Prompt(messages=list(messages)), session))
        said = calls[-1].output.content or ""
        was_cut = calls[-1].llm_info["finish_reason"] == "length"
        # A cut answer counts as broken, even with a guess in it: if tokens after the guess cost nothing, an entropy
        # bonus teaches the player to fill every answer up to the limit with noise.
        guess = None if was_cut else parse_guess(said)
        if guess is None:
            return calls, "broken"
        if guess == problem["answer"]:
            return calls, "hit"
        messages.append({"role": "assistant", "content": said})
        messages.append(
            {"role": "user", "content": feedback(guess, "higher" if problem["answer"] > guess else "lower")}
        )
    return calls, "missed"


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    started = time.monotonic()
    calls, outcome = await play(llm, problem, session)
    reward = final_reward(len(calls) - 1, outcome)
    return RolloutResult(
        training_texts=make_training_texts_from_llm_calls(llm, calls, reward),
        metrics=GuessingMetrics(
            reward=reward,
            success=outcome == "hit",
            no_error=outcome != "broken",
            no_answer=outcome == "broken",
            num_guesses=len(calls),
        ),
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
        rewards="rollout",
    )


generate_guessing_rollout = generate_rollout
