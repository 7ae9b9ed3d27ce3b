"""A model that says what the test wrote down, and a way to play one rollout with it."""

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from pipelinerl.launcher.probe import END_TOKEN, ByteTokenizer
from pipelinerl.llm import GenerateRequest, TrainableLLM
from pipelinerl.rollouts import CallTokens, RolloutResult

Play = Callable[..., Awaitable[RolloutResult]]


class WrittenAnswers:
    """Samples the given answers in order; remembers every prompt as text."""

    def __init__(self, answers: list[str]):
        self.answers = list(answers)
        self.prompts: list[str] = []

    async def generate(self, llm: TrainableLLM, request: GenerateRequest, session: aiohttp.ClientSession) -> CallTokens:
        self.prompts.append(llm.tokenizer.decode(request.token_ids.tolist()))
        completion = np.array([*self.answers.pop(0).encode(), END_TOKEN], dtype=np.int32)
        return CallTokens(
            prompt_ids=request.token_ids,
            completion_ids=completion,
            logprobs=np.full(len(completion), -0.5, dtype=np.float32),
            version_spans=np.array([[0, len(completion), 0]], dtype=np.int32),
            finish_reason="stop",
        )


@pytest.fixture
def play() -> Play:
    """``await play(rollout, problem, answers, **cfg)`` → (result, transport)."""

    async def run(
        rollout: Callable[..., Awaitable[RolloutResult]], problem: dict[str, Any], answers: list[str], **cfg: Any
    ) -> tuple[RolloutResult, WrittenAnswers]:
        llm = TrainableLLM(model_name="policy", tokenizer=ByteTokenizer(), collect_logprobs=True)
        llm._transport = transport = WrittenAnswers(answers)
        llm._turns = []
        config: DictConfig = OmegaConf.create(cfg)
        async with aiohttp.ClientSession() as session:
            return await rollout(config, llm, problem, session), transport

    return run
