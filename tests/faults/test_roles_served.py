"""A server is used only with known weights: what a restarted one does to the actor."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from omegaconf import OmegaConf

from benchmarks.whole_group import run_whole_group
from pipelinerl.actor.executor import Executor, RolloutRules
from pipelinerl.actor.messages import StartGroup
from pipelinerl.actor.router import Client, RequestLimits
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.testing import FakeServer, byte_tokenizer

TOKENIZER = byte_tokenizer()


async def rollout(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    call = await llm_async_generate(llm, Prompt.from_user_message("?"), session)
    metrics = BaseMetrics(reward=1, success=True, no_error=True, no_answer=False)
    return RolloutResult(training_texts=[make_training_text(llm, call)], metrics=metrics, latency=0.0)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(lambda *_: TOKENIZER.encode("ab")) as running:
        yield running


async def test_completions_with_weights_from_disk_are_repeated_until_the_server_has_those_of_the_run(
    server: FakeServer,
):
    server.version = "default"

    def answer(prompt_ids: list[int], params: dict[str, Any], index: int) -> list[int]:
        if len(server.requests) == 2:
            server.version = 7
        return TOKENIZER.encode("ab")

    server.answer = answer
    limits = RequestLimits(timeout_s=120, max_retries=3, max_completions=8)
    rules = RolloutRules(timeout_s=120, seq_length=100)
    llm = TrainableLLM(model_name="policy", tokenizer=TOKENIZER, parameters={"max_tokens": 8}, collect_logprobs=True)
    start = StartGroup(task_id=1, group_id="g", domain=0, problem={}, attempts=(0,), evaluation=False, version=6)
    async with aiohttp.ClientSession() as session:
        executor = Executor(OmegaConf.create({}), [rollout], (llm, llm), Client(session, limits), rules)
        executor.servers.update({"actor_llm_0": server.url}, {"actor_llm_0": 7})
        finished = await run_whole_group(executor, start)
    assert finished.failures == ()
    (sequence,) = finished.rollouts[0].sequences
    assert set(sequence.spans[:, 2].tolist()) == {7}
    assert len(server.requests) == 2
    assert finished.aborted_requests == 1
