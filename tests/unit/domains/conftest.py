"""A model that says what the test wrote down, and a way to play one rollout with it."""

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from omegaconf import DictConfig, OmegaConf

from pipelinerl.launcher.trial_tokenizer import ByteTokenizer
from pipelinerl.rollouts import RolloutResult
from pipelinerl.testing import FakeLLM

Play = Callable[..., Awaitable[RolloutResult]]


class WrittenAnswers:
    """Says the given answers in order and remembers every prompt as text."""

    def __init__(self, answers: list[str]):
        self.answers = list(answers)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.answers.pop(0)


@pytest.fixture
def play() -> Play:
    """``await play(rollout, problem, answers, **cfg)`` → (result, answers with the prompts).

    ``max_tokens``: limit of every answer, in bytes with the end token.
    """

    async def run(
        rollout: Callable[..., Awaitable[RolloutResult]],
        problem: dict[str, Any],
        answers: list[str],
        max_tokens: int | None = None,
        **cfg: Any,
    ) -> tuple[RolloutResult, WrittenAnswers]:
        written = WrittenAnswers(answers)
        parameters = {} if max_tokens is None else {"max_tokens": max_tokens}
        llm = FakeLLM.saying(written, tokenizer=ByteTokenizer(), parameters=parameters)
        config: DictConfig = OmegaConf.create(cfg)
        async with aiohttp.ClientSession() as session:
            return await rollout(config, llm, problem, session), written

    return run
