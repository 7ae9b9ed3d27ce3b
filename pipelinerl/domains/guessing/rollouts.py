"""Plays one game as ONE growing conversation, so that its turns extend each other into one training sequence."""

import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.guessing.game import GameOutcome, feedback, final_reward, instructions, parse_guess
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult


class GuessingMetrics(BaseMetrics):
    num_guesses: int
    """Guesses made, including the last one."""


required_problem_keys = ("answer", "max_number", "max_turns")


async def play(
    llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> tuple[list[LLMCall], GameOutcome]:
    """Plays one game to its end. Returns the calls and the outcome.

    An answer that the token limit cut is "broken", even with a guess in it. Otherwise tokens after the guess cost
    nothing, and an entropy bonus alone teaches the player to fill every answer with noise up to the limit.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": instructions(problem["max_number"])}]
    calls: list[LLMCall] = []
    for _ in range(problem["max_turns"]):
        calls.append(await llm_async_generate(llm, Prompt(messages=list(messages)), session))
        said = calls[-1].output.content or ""
        was_cut = calls[-1].llm_info["finish_reason"] == "length"
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
    texts = [make_training_text(llm, call) for call in calls]
    for text in texts:
        text.reward = reward
    return RolloutResult(
        training_texts=texts,
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
