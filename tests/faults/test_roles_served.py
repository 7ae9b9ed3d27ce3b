"""A server is used only with known weights: what a dead or restarted one does to the actor and to the trainer."""

import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from omegaconf import OmegaConf

from pipelinerl.actor.executor import Executor, RolloutRules
from pipelinerl.actor.messages import StartGroup
from pipelinerl.actor.transport import Client, RequestLimits
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.finetune.publish import EvaluationLease, Publisher
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.records import EvaluationStarted
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.testing import FakeServer, byte_tokenizer
from pipelinerl.weights.sender import WeightSender
from pipelinerl.world import Job
from tests.trainer_kit import SERVER, FakeSender

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
    limits = RequestLimits(timeout_s=20, max_retries=3, max_completions=8)
    rules = RolloutRules(timeout_s=20, seq_length=100)
    llm = TrainableLLM(model_name="policy", tokenizer=TOKENIZER, parameters={"max_tokens": 8}, collect_logprobs=True)
    start = StartGroup(ticket=1, group_id="g", domain=0, problem={}, attempts=(0,), evaluation=False, version=6)
    async with aiohttp.ClientSession() as session:
        executor = Executor(OmegaConf.create({}), [rollout], (llm, llm), Client(session, limits), rules)
        executor.servers.update({"actor_llm_0": server.url})
        finished = await executor.run_group(start)
    assert finished.failures == ()
    (sequence,) = finished.rollouts[0].sequences
    assert set(sequence.spans[:, 2].tolist()) == {7}
    assert len(server.requests) == 2
    assert finished.aborted_requests == 1


def test_server_whose_port_is_closed_leaves_service_without_a_push(unused_tcp_port: int):
    job = Job(name="actor_llm_0", kind="actor_llm", url=f"http://127.0.0.1:{unused_tcp_port}")
    sender = WeightSender([job], backend="gloo", bucket_mb=1, timeout_s=5, secret="s")
    try:
        link = sender._links["actor_llm_0"]
        link.in_service = True
        sender._watch_one(link)
        assert sender.in_service == ()
        assert sender.returning == ()
    finally:
        sender.close()


def test_server_that_returns_during_an_evaluation_is_taken_back():
    sender = FakeSender()
    messages: list[Any] = []
    lease = EvaluationLease(lambda: [messages.pop()] if messages else [], clock=lambda: 0.0)
    publisher = Publisher(sender, lambda _: None, lease)
    try:
        publisher.begin(3, [], [], None)
        assert publisher.wait_live(3, 10)
        messages.append(EvaluationStarted(version=3, deadline=100.0))
        assert publisher.held(4)
        sender.returning = (SERVER,)
        deadline = time.monotonic() + 10
        while not sender.readmitted and time.monotonic() < deadline:
            time.sleep(0.005)
        assert sender.readmitted == 1
        assert publisher.held(4)
    finally:
        publisher.close()
