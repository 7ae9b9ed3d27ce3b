"""An agent of the official OpenAI client against a real vLLM server: what is recorded is what the server sampled.

A proxy between them is the check state: it keeps every request and every answer of the server as they crossed the wire.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from aiohttp import web
from omegaconf import OmegaConf

from examples.largest_agent.agent import SUBMIT_TOOL
from examples.largest_agent.domain import generate_rollout
from pipelinerl.actor.sequences import to_rollout
from pipelinerl.agents import record_agent
from pipelinerl.domains.largest import load_problems
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.answers import Answer, AnswerRequest, Completion
from pipelinerl.rollouts import RolloutResult, TrainingText
from pipelinerl.streams.codec import Codec
from pipelinerl.tiny_model import build
from pipelinerl.tiny_model.__main__ import user_cache

NUM_ROLLOUTS = 24
Exchange = tuple[list[int], Completion]
"""Prompt ids as they were sent, and the server's completion."""


@asynccontextmanager
async def recording_proxy(server_url: str, session: aiohttp.ClientSession) -> AsyncIterator[tuple[str, list[Exchange]]]:
    seen: list[Exchange] = []
    requests: Codec[AnswerRequest] = Codec(AnswerRequest)
    answers: Codec[Answer] = Codec(Answer)

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        async with session.post(server_url + request.path, data=body) as a:
            payload, status, media_type = await a.read(), a.status, a.content_type
        if status == 200:
            (completion,) = answers.decode(payload).completions
            seen.append((requests.decode(body).token_ids.tolist(), completion))
        return web.Response(body=payload, status=status, content_type=media_type)

    app = web.Application()
    app.router.add_post("/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


OVERRIDES = ("vllm_config.vllm_kwargs.max_model_len=512", "+vllm_config.env={VLLM_SERVER_DEV_MODE: '1'}")
"""With vLLM's development route for the label of the weights."""


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Any:
    folder = tmp_path_factory.mktemp("agent")
    model = build(folder / "model", "examples.largest_agent.model.largest_agent", 0, cache=user_cache() / "models")
    with serving.running(folder, model, overrides=OVERRIDES) as server:
        yield server


async def policy(server: Any, base_url: str, session: aiohttp.ClientSession) -> TrainableLLM:
    headers = {"Authorization": f"Bearer {server.secret}"}
    url = f"{server.job.url}/update_weight_version"
    async with session.post(url, json={"new_version": "7"}, headers=headers) as response:
        assert response.status == 200, await response.text()
    return TrainableLLM(
        base_url=base_url,
        model_name="policy",
        tokenizer_name=str(OmegaConf.load(server.run_dir / "conf" / "config.yaml").model_path),
        parameters={"max_tokens": 24, "temperature": 1.0},
        collect_logprobs=True,
    )


def logprobs_of(completion: Completion) -> list[float]:
    assert completion.logprobs is not None
    return completion.logprobs.tolist()


def exchange_of(text: TrainingText, seen: list[Exchange]) -> Exchange:
    """The one exchange that the text was recorded from, by its prompt and completion."""
    ids = text.input_ids
    (found,) = [e for e in seen if [*e[0], *e[1].token_ids] == ids and len(e[1].token_ids) == text.output_tokens]
    return found


async def test_streaming_agent_with_tools_tokens_equal_what_the_server_sampled(agent_server: Any) -> None:
    problems = load_problems(["train"])[::500][:NUM_ROLLOUTS]
    async with aiohttp.ClientSession() as session, recording_proxy(agent_server.job.url, session) as (url, seen):
        llm = await policy(agent_server, url, session)
        llm.parameters["seed"] = 1
        results: list[RolloutResult] = await asyncio.gather(
            *(generate_rollout(OmegaConf.create({}), llm.model_copy(), problem, session) for problem in problems)
        )
    assert len(seen) == len(results) == NUM_ROLLOUTS
    assert 0 < sum(result.metrics.success for result in results) < NUM_ROLLOUTS
    for result in results:
        (text,) = result.training_texts
        prompt_ids, completion = exchange_of(text, seen)
        sampled = completion.token_ids.tolist()
        assert text.input_ids == prompt_ids + sampled
        assert text.labels == [-100] * len(prompt_ids) + sampled
        assert text.logprobs == pytest.approx(logprobs_of(completion), rel=1e-6)
        (sequence,) = to_rollout(
            result, attempt=0, latency_s=0.0, num_llm_calls=1, fallback_version=0, seq_length=512
        ).sequences
        assert sequence.token_ids.tolist() == prompt_ids + sampled
        assert sequence.spans.tolist() == [[len(prompt_ids), len(sequence.token_ids), 7]]


async def test_turns_of_an_agent_become_one_sequence_of_what_was_sampled(agent_server: Any) -> None:
    """Three calls: the tool's result goes back into the conversation as the client's own objects dump it."""
    async with aiohttp.ClientSession() as session, recording_proxy(agent_server.job.url, session) as (url, seen):
        llm = await policy(agent_server, url, session)
        llm.state.turns = []
        async with record_agent(llm, session) as agent:
            client = openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0)
            messages: list[Any] = [{"role": "user", "content": "Which is the largest of 18, 5 and 30?"}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=[SUBMIT_TOOL])
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Which is the largest?"})
                if not message.tool_calls:
                    messages.append({"role": "user", "content": "Which is the largest?"})
            await client.close()
            result = agent.result(reward=1.0, success=True)
    rollout = to_rollout(result, attempt=0, latency_s=0.0, num_llm_calls=3, fallback_version=0, seq_length=512)
    (sequence,) = rollout.sequences
    last_prompt, last_completion = seen[-1]
    assert sequence.token_ids.tolist() == last_prompt + last_completion.token_ids.tolist()
    trained = np.concatenate([np.arange(start, end) for start, end, _ in sequence.spans])
    sampled = [token for _, completion in seen for token in completion.token_ids.tolist()]
    assert sequence.token_ids[trained].tolist() == sampled
    logprobs = [logprob for _, completion in seen for logprob in logprobs_of(completion)]
    assert sequence.logprobs.tolist() == pytest.approx(logprobs, rel=1e-6)
