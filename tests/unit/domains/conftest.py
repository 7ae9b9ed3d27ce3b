"""A model that says what the test wrote down, and a way to play one rollout with it."""

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from omegaconf import DictConfig, OmegaConf

from pipelinerl.launcher.trial import ByteTokenizer
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
    """``await play(rollout, problem, answers, **cfg)`` → (result, answers with the prompts)."""

    async def run(
        rollout: Callable[..., Awaitable[RolloutResult]], problem: dict[str, Any], answers: list[str], **cfg: Any
    ) -> tuple[RolloutResult, WrittenAnswers]:
        written = WrittenAnswers(answers)
        llm = FakeLLM.saying(written, tokenizer=ByteTokenizer())
        config: DictConfig = OmegaConf.create(cfg)
        async with aiohttp.ClientSession() as session:
            return await rollout(config, llm, problem, session), written

    return run
