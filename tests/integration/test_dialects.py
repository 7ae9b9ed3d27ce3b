"""The clients of OpenAI and Anthropic against the recording endpoint, in every dialect, streamed and in one piece."""

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.agents import RecordedAgent, record_agent
from pipelinerl.records import TrainingSequence
from pipelinerl.testing import FakeLLM, byte_tokenizer
from tests.says import says
from tests.vision import picture, tokenizer_with_images

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "add", "description": "adds", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": False}
CALLS = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {a}.0}}}}</tool_call>' for a in (1, 2))
SCRIPT = [f"I add them.\n{CALLS}", "  It is 3. \n", "Bye."]
vllm_is_imported = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported


@asynccontextmanager
async def recording(*lines: str, **fields: Any) -> AsyncIterator[RecordedAgent]:
    llm = FakeLLM.saying(lines, parameters={"temperature": 1.0, "max_tokens": 256}, **fields)
    async with aiohttp.ClientSession() as session, record_agent(llm, session) as agent:
        yield agent


def openai_client(agent: RecordedAgent) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0)


def anthropic_client(agent: RecordedAgent) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=agent.anthropic_base_url, api_key=agent.api_key, max_retries=0)


async def chat(agent: RecordedAgent, stream: bool) -> list[str]:
    texts = []
    messages: list[Any] = [{"role": "developer", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]
    async with openai_client(agent) as client:
        for _ in range(3):
            asked = {"model": "m", "messages": messages, "tools": [CHAT_TOOL]}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    said = (await events.get_final_completion()).choices[0].message
            else:
                said = (await client.chat.completions.create(**asked)).choices[0].message
            texts.append(said.content or "")
            messages.append({"role": "assistant", "content": said.content and said.content.strip()})
            if said.tool_calls:
                calls = [(call.id, call.function.name, call.function.arguments) for call in said.tool_calls]
                messages[-1]["tool_calls"] = [
                    {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                    for id_, name, arguments in calls
                ]
                messages += [
                    {"role": "tool", "tool_call_id": id_, "content": str(json.loads(arguments)["a"])}
                    for id_, _, arguments in calls
                ]
            else:
                messages.append({"role": "user", "content": "Thanks."})
    return texts


async def messages(agent: RecordedAgent, stream: bool) -> list[str]:
    texts = []
    history: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    async with anthropic_client(agent) as client:
        for _ in range(3):
            cached = {"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}
            asked = {
                "model": "m", "max_tokens": 256, "system": [cached], "messages": history, "tools": [ANTHROPIC_TOOL],
                "thinking": {"type": "adaptive"},
            }  # fmt: skip
            if stream:
                async with client.messages.stream(**asked) as events:
                    said = await events.get_final_message()
            else:
                said = await client.messages.create(**asked)
            history.append({"role": "assistant", "content": [block.model_dump() for block in said.content]})
            texts.append("".join(block.text for block in said.content if block.type == "text"))
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [{"type": "text", "text": f"{block.input['a']}"}],
                }
                for block in said.content
                if block.type == "tool_use"
            ]
            assert said.stop_reason == ("tool_use" if results else "end_turn")
            history.append({"role": "user", "content": results or "Thanks."})
    return texts


async def responses(agent: RecordedAgent, stream: bool) -> list[str]:
    """The items of every answer go back as they came."""
    items: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    texts = []
    async with openai_client(agent) as client:
        for _ in range(3):
            said = await respond(client, stream, input=items, instructions="Add.")
            texts.append(said.output_text)
            items += [item.model_dump(exclude_none=True) for item in said.output]
            items += results_of(said) or [{"role": "user", "content": "Thanks."}]
    return texts


async def responses_by_id(agent: RecordedAgent, stream: bool) -> list[str]:
    texts, before, items = [], None, [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}]
    async with openai_client(agent) as client:
        for _ in range(3):
            said = await respond(client, stream, input=items, instructions="Add.", previous_response_id=before)
            texts.append(said.output_text)
            before, items = said.id, results_of(said) or [{"role": "user", "content": "Thanks."}]
    return texts


async def respond(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await client.responses.create(model="m", tools=[RESPONSES_TOOL], **asked)
    asked = {name: value for name, value in asked.items() if value is not None}
    async with client.responses.stream(model="m", tools=[RESPONSES_TOOL], **asked) as events:
        return await events.get_final_response()


def results_of(said: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": str(json.loads(item.arguments)["a"])}
        for item in said.output
        if item.type == "function_call"
    ]


def only_sequence(agent: RecordedAgent) -> TrainingSequence:
    result = agent.result(reward=1.0, success=True)
    (sequence,) = to_rollout(
        result, attempt=0, latency_s=0.0, num_llm_calls=len(agent.calls), fallback_version=0, seq_length=10**6
    ).sequences
    return sequence


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("play", [chat, messages, responses, responses_by_id])
async def test_three_turns_with_parallel_calls_are_one_sequence(
    play: Callable[[RecordedAgent, bool], Any], stream: bool
) -> None:
    async with recording(*SCRIPT) as agent:
        texts = await play(agent, stream)
        sequence = only_sequence(agent)
        text = agent.llm.tokenizer.decode(sequence.token_ids)
    assert texts == ["I add them.", *SCRIPT[1:]]
    start = text.index("<|im_start|>system\nAdd.")
    assert text[start:] == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n"
        f"<|im_start|>assistant\n{SCRIPT[0]}<|im_end|>\n<|im_start|>tool\n1.0<|im_end|>\n"
        f"<|im_start|>tool\n2.0<|im_end|>\n"
        f"<|im_start|>assistant\n{SCRIPT[1]}<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n"
        f"<|im_start|>assistant\n{SCRIPT[2]}<|im_end|>"
    )


THINKING = byte_tokenizer()
THINKING.add_tokens(["<think>", "</think>"])
THOUGHT = "<think>\nhm\n</think>\n\nYes."


@vllm_is_imported
@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_are_told_apart_in_every_dialect(stream: bool) -> None:
    async with recording(*[THOUGHT] * 4, tokenizer=THINKING, reasoning_parser="qwen3") as agent:
        asked: list[Any] = [{"role": "user", "content": "so?"}]
        async with openai_client(agent) as client, anthropic_client(agent) as other:
            if stream:
                async with client.chat.completions.stream(model="m", messages=asked) as chat_events:
                    pieces = [event.chunk.choices[0].delta async for event in chat_events if event.type == "chunk"]
                    told = "".join(getattr(piece, "reasoning_content", "") for piece in pieces)
                    text = "".join(piece.content or "" for piece in pieces)
                async with client.responses.stream(model="m", input="so?") as events:
                    response = await events.get_final_response()
                async with other.messages.stream(
                    model="m", max_tokens=99, messages=asked, thinking={"type": "adaptive"}
                ) as message_events:
                    message = await message_events.get_final_message()
                async with other.messages.stream(model="m", max_tokens=99, messages=asked) as message_events:
                    unasked = await message_events.get_final_message()
            else:
                said = (await client.chat.completions.create(model="m", messages=asked)).choices[0].message
                told, text = said.model_extra["reasoning_content"], said.content
                response = await client.responses.create(model="m", input="so?")
                thinking = {"type": "adaptive"}
                message = await other.messages.create(model="m", max_tokens=99, messages=asked, thinking=thinking)
                unasked = await other.messages.create(model="m", max_tokens=99, messages=asked)
    assert (told, text) == ("hm", "Yes.")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert (response.output[0].content[0].text, response.output_text) == ("hm", "Yes.")
    assert [(block.type, getattr(block, "thinking", None) or block.text) for block in message.content] == [
        ("thinking", "hm"),
        ("text", "Yes."),
    ]
    assert [block.type for block in unasked.content] == ["text"]


async def test_ends_of_an_answer_are_named_as_each_dialect_names_them() -> None:
    async with recording(*["look\nEND of it"] * 2, "a" * 20, "b" * 20) as agent:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        async with openai_client(agent) as client, anthropic_client(agent) as other:
            stopped = await other.messages.create(model="m", max_tokens=50, messages=asked, stop_sequences=["END", "x"])
            chat_stopped = await client.chat.completions.create(model="m", messages=asked, stop="END")
            cut = await other.messages.create(model="m", max_tokens=5, messages=asked)
            response = await client.responses.create(model="m", input="hi", max_output_tokens=6)
        assert agent.calls[0].output.content == "look\nEND"
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "END", "look\n")
    assert (chat_stopped.choices[0].finish_reason, chat_stopped.choices[0].message.content) == ("stop", "look\n")
    assert (cut.stop_reason, cut.content[0].text, cut.usage.output_tokens) == ("max_tokens", "aaaaa", 5)
    assert (response.status, response.incomplete_details.reason, response.output_text) == (
        "incomplete", "max_output_tokens", "bbbbbb",
    )  # fmt: skip


async def test_logprobs_of_chat_completions_are_those_that_are_trained() -> None:
    async with recording("ab", logprob=-0.25) as agent, openai_client(agent) as client:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        said = await client.chat.completions.create(model="m", messages=asked, logprobs=True)
    tokens = said.choices[0].logprobs.content
    assert [(token.token, token.logprob) for token in tokens] == [("a", -0.25), ("b", -0.25), ("<|im_end|>", -0.25)]


async def test_tokens_are_counted_as_they_are_asked() -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [ANTHROPIC_TOOL]}
    response: dict[str, Any] = {"model": "m", "input": "hi", "instructions": "Add.", "tools": [RESPONSES_TOOL]}
    async with recording("yes", "no") as agent, anthropic_client(agent) as client, openai_client(agent) as other:
        count = await client.messages.count_tokens(**asked)
        said = await client.messages.create(max_tokens=99, **asked)
        other_count = await other.responses.input_tokens.count(**response)
        other_said = await other.responses.create(**response)
    assert count.input_tokens == said.usage.input_tokens == agent.calls[0].prompt_length_tokens
    assert other_count.input_tokens == other_said.usage.input_tokens == agent.calls[1].prompt_length_tokens


async def test_the_runs_length_is_the_longest() -> None:
    """Clients of Anthropic always name a length: pydantic-ai 16384, LiteLLM 4096."""
    async with recording("a" * 300, "b" * 300) as agent, anthropic_client(agent) as client:
        said = await client.messages.create(model="m", max_tokens=16384, messages=HI)
        shorter = await client.messages.create(model="m", max_tokens=9, messages=HI)
    assert (said.usage.output_tokens, said.stop_reason) == (256, "max_tokens")
    assert (shorter.usage.output_tokens, shorter.stop_reason) == (9, "max_tokens")


async def test_unknown_routes_are_refused_in_the_dialects_own_shape() -> None:
    async with recording("x") as agent, openai_client(agent) as client, anthropic_client(agent) as other:
        with pytest.raises(openai.NotFoundError, match=says("no POST /v1/conversations")) as refused:
            await client.conversations.create()
        with pytest.raises(anthropic.NotFoundError, match=says("no GET /v1/messages/batches")) as refused_too:
            await other.messages.batches.list()
    assert refused.value.type == "invalid_request_error"
    assert refused_too.value.body["error"]["type"] == "not_found_error"


HI: list[Any] = [{"role": "user", "content": "hi"}]
ADDRESS = "http://127.0.0.1/x.png"
PICTURE = {"type": "image", "source": {"type": "url", "url": ADDRESS}}
UPLOADED = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}
SAYING = [*HI, {"role": "assistant", "content": "The answer is"}]
CALLED = {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}
LONG = [{"role": "user", "content": "x" * (10 * 32000 + 1 - len("user"))}]
SHOWN = {"type": "input_image", "image_url": "data:image/png;base64,eA=="}


@pytest.mark.parametrize(
    ("path", "body", "facts"),
    [
        ("chat/completions", {"messages": HI, "n": 2}, ["n is 2"]),
        ("chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}, ["json_object"]),
        ("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 3}, ["top_logprobs is 3"]),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, ["'file'"]),
        ("messages", {"max_tokens": 9, "messages": HI, "temperature": 0.3}, ["temperature is 0.3"]),
        ("messages", {"max_tokens": 9, "messages": HI, "top_k": 5}, ["top_k is 5"]),
        ("messages", {"messages": HI}, ["max_tokens"]),
        ("chat/completions", {"messages": HI, "functions": [{"name": "add"}]}, ["functions is", "`tools`"]),
        ("chat/completions", {"messages": HI, "function_call": "auto"}, ["function_call is auto"]),
        ("chat/completions", {"messages": [{"role": "function", "name": "add", "content": "3"}]}, ["tool_calls"]),
        ("chat/completions", {"messages": [{"role": "assistant", "function_call": {}}, *HI, CALLED]}, ["tool_calls"]),
        ("chat/completions", {"messages": SAYING, "continue_final_message": True}, ["continue_final_message is True"]),
        ("chat/completions", {"messages": HI, "documents": [{"text": "x"}]}, ["documents is"]),
        ("chat/completions", {"messages": HI, "truncate_prompt_tokens": 9}, ["truncate_prompt_tokens is 9"]),
        ("chat/completions", {"messages": SAYING, "add_generation_prompt": False}, ["add_generation_prompt is False"]),
        ("chat/completions", {"messages": [*HI, SAYING[-1] | {"prefix": True}]}, ["prefix", "continues no message"]),
        ("messages", {"max_tokens": 9, "messages": SAYING}, ["the last message", "continues no message"]),
        ("chat/completions", {"messages": HI, "repetition_penalty": 1.2}, ["repetition_penalty is 1.2"]),
        ("chat/completions", {"messages": HI, "presence_penalty": 0.5}, ["presence_penalty is 0.5"]),
        ("chat/completions", {"messages": HI, "guided_json": {"type": "object"}}, ["guided_json is", "constraints"]),
        ("chat/completions", {"messages": HI, "structured_outputs": {"regex": "a"}}, ["structured_outputs is"]),
        ("responses", {"input": "hi", "guided_regex": "a+"}, ["guided_regex is a+"]),
        ("messages", {"max_tokens": 9, "messages": HI, "guided_choice": ["a"]}, ["guided_choice is"]),
        ("responses", {"input": "hi", "frequency_penalty": 1}, ["frequency_penalty is 1"]),
        ("chat/completions", {"messages": HI, "chat_template_kwargs": {"x": 1}}, ["chat_template_kwargs is"]),
        ("chat/completions", {"messages": LONG}, ["320001 characters", "maximum context length"]),
        ("messages", {"max_tokens": 9, "messages": LONG}, ["320001 characters"]),
        ("responses", {"input": LONG[0]["content"]}, ["320001 characters"]),
        ("messages/count_tokens", {"messages": LONG}, ["320001 characters"]),
        (
            "messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": [PICTURE]}]},
            ["Nothing is downloaded"],
        ),
        (
            "messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": [UPLOADED]}]},
            ["Nothing is downloaded"],
        ),
        ("messages", {"max_tokens": 9, "messages": HI, "tools": [{"type": "bash_1", "name": "bash"}]}, ["'bash'"]),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, ["'document'"]),
        ("responses", {"input": "hi", "previous_response_id": "resp_0"}, ["'resp_0'"]),
        ("responses", {"input": "hi", "text": {"format": {"type": "json_schema"}}}, ["json_schema"]),
        ("responses", {"input": "hi", "tools": [{"type": "web_search"}]}, ["'web_search'"]),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, ["'item_reference'"]),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            ["data URL"],
        ),
        ("responses", {"input": [{"role": "assistant", "content": [SHOWN]}]}, ["'input_image'"]),
        ("responses/input_tokens", {"input": [{"role": "user", "content": [SHOWN]}]}, ["images", "how many tokens"]),
        ("responses", {"input": "hi", "background": True}, ["background"]),
        ("responses", {"input": "hi", "include": ["message.output_text.logprobs"]}, ["only Chat Completions has"]),
        ("responses/input_tokens", {"input": "hi", "conversation": "conv_1"}, ["conversation is set"]),
        ("responses", {"input": []}, ["input is empty"]),
    ],
)
async def test_unsupported_request_is_refused_in_the_shape_of_its_api(path: str, body: dict, facts: list[str]) -> None:
    async with recording("x") as agent, aiohttp.ClientSession() as session:
        for key, status in ((agent.api_key, 400), ("wrong", 401)):
            headers = {"x-api-key": key} if path.startswith("messages") else {"Authorization": f"Bearer {key}"}
            async with session.post(f"{agent.base_url}/{path}", json=body, headers=headers) as response:
                assert response.status == status
                told = await response.json()
            error = told["error"]
            assert error["type"] == ("invalid_request_error" if status == 400 else "authentication_error")
            assert told.get("type") == ("error" if path.startswith("messages") else None)
            if status == 400:
                assert all(fact in error["message"] for fact in facts), error["message"]
        assert (agent.calls, agent.failure) == ([], None)


async def test_fields_that_change_nothing_are_accepted() -> None:
    neutral = {"n": 1, "functions": [], "function_call": "none", "continue_final_message": False, "guided_json": None}
    neutral |= {"add_generation_prompt": True, "repetition_penalty": 1.0, "presence_penalty": 0, "logit_bias": {}}
    neutral |= {"stop_token_ids": [], "user": "me", "store": False, "reasoning_effort": "low"}
    async with recording("x") as agent, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        body = {"messages": [*SAYING, *HI], **neutral}
        async with session.post(f"{agent.base_url}/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()


FORCED = {"type": "function", "function": {"name": "add"}}
STRICT = {"type": "function", "function": {**CHAT_TOOL["function"], "strict": True}}
THINKS = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        (
            "chat/completions",
            {"messages": HI, "tools": [CHAT_TOOL]},
            [{"tool_choice": "required"}, {"tool_choice": FORCED}, {"tools": [STRICT]}, {"parallel_tool_calls": False}],
        ),
        (
            "messages",
            {"max_tokens": 9, "messages": HI, "tools": [ANTHROPIC_TOOL]},
            [
                {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
                {"tool_choice": {"type": "tool", "name": "add"}},
                {"tools": [ANTHROPIC_TOOL | {"strict": True}], "thinking": THINKS},
            ],
        ),
        (
            "responses",
            {"input": "hi", "tools": [RESPONSES_TOOL]},
            [
                {"tool_choice": "required", "parallel_tool_calls": False},
                {"tool_choice": {"type": "function", "name": "add"}},
                {"tools": [RESPONSES_TOOL | {"strict": True}], "reasoning": {"effort": "low"}},
            ],
        ),
    ],
)
async def test_wishes_for_tools_change_neither_prompt_nor_sampling(path: str, body: dict, ignored: list[dict]) -> None:
    """As docs/guides/agent.md says. The choice `none` alone hides the tools."""
    none = {"tool_choice": {"type": "none"} if path == "messages" else "none"}
    without = {name: value for name, value in body.items() if name != "tools"}
    asked = [body, *(body | one for one in ignored), body | none, without]
    async with recording(*("x" * len(asked))) as agent, aiohttp.ClientSession() as session:
        for one in asked:
            headers = {"Authorization": f"Bearer {agent.api_key}"}
            async with session.post(f"{agent.base_url}/{path}", json=one, headers=headers) as response:
                assert response.status == 200, await response.text()
    prompts = [call.texts[0] for call in agent.calls]
    assert set(prompts[:-2]) == {prompts[0]}
    assert prompts[-2] == prompts[-1] != prompts[0]
    assert all(call.llm_info["parameters"].keys() <= {"temperature", "max_tokens"} for call in agent.calls)


async def test_cancelled_request_is_neither_recorded_nor_continued_and_its_retry_is() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    told = iter(["never read", "read", "and so on"])

    async def answer(prompt: str) -> str:
        text = next(told)
        if text == "never read":
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return text

    llm = FakeLLM.saying(answer, parameters={"temperature": 1.0, "max_tokens": 64})
    async with aiohttp.ClientSession() as session, record_agent(llm, session) as agent:
        async with anthropic_client(agent) as client:
            first = asyncio.create_task(client.messages.create(model="m", max_tokens=99, messages=HI))
            await asyncio.wait_for(begun.wait(), 60)
            first.cancel()
            await asyncio.wait_for(ended.wait(), 60)
            said = await client.messages.create(model="m", max_tokens=99, messages=HI)
            history = [*HI, {"role": "assistant", "content": said.content[0].text}, *HI]
            await client.messages.create(model="m", max_tokens=99, messages=history)
        assert [call.output.content for call in agent.calls] == ["read", "and so on"]
        only_sequence(agent)


async def test_client_that_leaves_while_its_answer_is_written_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    client = socket.socket()
    reset_when_closed = struct.pack("ii", 1, 0)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_when_closed)

    def answer(prompt: str) -> str:
        client.close()
        return "never read"

    llm = FakeLLM.saying(answer, parameters={"temperature": 1.0, "max_tokens": 64})
    async with aiohttp.ClientSession() as session, record_agent(llm, session) as agent:
        client.connect(("127.0.0.1", int(agent.anthropic_base_url.rpartition(":")[2])))
        body = json.dumps({"model": "m", "messages": HI, "stream": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {agent.api_key}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        while not agent.calls:  # noqa: ASYNC110 — the endpoint tells nobody
            await asyncio.sleep(0.005)
    assert not caplog.records


async def test_sub_agents_of_other_dialects_share_the_endpoint_and_keep_their_sequences() -> None:
    async with recording(*[f"answer {i}" for i in range(6)]) as agent:
        async with openai_client(agent) as client, anthropic_client(agent) as other:

            async def sub_agent(name: str) -> None:
                history = [{"role": "user", "content": name}]
                for _ in range(2):
                    if name == "researcher":
                        said = await other.messages.create(model="m", max_tokens=64, messages=history)
                        text = said.content[0].text
                    elif name == "writer":
                        text = (await client.responses.create(model="m", input=history)).output_text
                    else:
                        one = await client.chat.completions.create(model="m", messages=history)
                        text = one.choices[0].message.content
                    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]

            await asyncio.gather(*map(sub_agent, ("researcher", "writer", "critic")))
        rollout = to_rollout(
            agent.result(reward=1.0, success=True), attempt=0, latency_s=0.0, num_llm_calls=6, fallback_version=0,
            seq_length=10**6,
        )  # fmt: skip
        assert agent.llm.state.num_forks == 0
    assert len(rollout.sequences) == 3
    assert [len(sequence.spans) for sequence in rollout.sequences] == [2, 2, 2]


async def test_errors_reach_the_clients_as_their_own_exceptions() -> None:
    async with recording("x") as agent, openai_client(agent) as client:
        with pytest.raises(openai.BadRequestError, match=says("temperature is 0.2")):
            await client.responses.create(model="m", input="hi", temperature=0.2)


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


async def show_in_chat(agent: RecordedAgent, images: list[str]) -> None:
    """Asks about the first image, and is shown the others beside what the tool says."""
    shown: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look"}, shown[0]]}]
    async with openai_client(agent) as client:
        asked = {"model": "m", "tools": [CHAT_TOOL]}
        said = (await client.chat.completions.create(messages=messages, **asked)).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "see"})
        await client.chat.completions.create(messages=[*messages, {"role": "user", "content": shown[1:]}], **asked)


async def show_in_messages(agent: RecordedAgent, images: list[str]) -> None:
    def block(url: str) -> dict[str, Any]:
        data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        return {"type": "image", "source": {"type": "url", "url": url} if url.startswith("http") else data}

    first, *later = map(block, images)
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look"}, first]}]
    async with anthropic_client(agent) as client:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 99, "tools": [ANTHROPIC_TOOL]}
        said = await client.messages.create(messages=history, **asked)
        result = {"type": "tool_result", "tool_use_id": said.content[0].id}
        history.append({"role": "assistant", "content": said.content})
        history.append({"role": "user", "content": [result | {"content": [{"type": "text", "text": "see"}, *later]}]})
        await client.messages.create(messages=history, **asked)


async def show_in_responses(agent: RecordedAgent, images: list[str]) -> None:
    first, *later = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in images]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "look"}, first]}]
    async with openai_client(agent) as client:
        said = await client.responses.create(model="m", tools=[RESPONSES_TOOL], input=items)
        result = {"type": "function_call_output", "call_id": said.output[0].call_id}
        items += [said.output[0], result | {"output": [{"type": "input_text", "text": "see"}, *later]}]
        await client.responses.create(model="m", tools=[RESPONSES_TOOL], input=items)


SHOWING = [show_in_chat, show_in_messages, show_in_responses]


@pytest.mark.parametrize("show", SHOWING)
async def test_images_are_trained_as_they_were_sent(show: Callable[..., Any], tmp_path: Path) -> None:
    images, call = [picture(4, 3, seed=0), picture(2, 5, seed=1)], CALLS[: len(CALLS) // 2]
    async with recording(call, "Blue.", tokenizer=tokenizer_with_images(tmp_path)) as agent:
        await show(agent, [data_url(image) for image in images])
        sequence = only_sequence(agent)
        text = agent.llm.tokenizer.decode(sequence.token_ids)
        sent = [made.call_tokens.images for made in agent.calls if made.call_tokens]
        image_id = agent.llm.tokenizer.convert_tokens_to_ids("<image>")
    assert text == (
        f"<|im_start|>user\nlook<image><|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n"
        "<|im_start|>tool\nsee<|im_end|>\n<|im_start|>user\n<image><|im_end|>\n<|im_start|>assistant\nBlue.<|im_end|>"
    )
    assert sent == [(images[0],), tuple(images)]
    places = np.flatnonzero(sequence.token_ids == image_id).tolist()
    assert sequence.images.tolist() == [[index, place, place + 1] for index, place in enumerate(places)]


@pytest.mark.parametrize(
    ("image", "fact"),
    [(ADDRESS, "Nothing is downloaded"), (data_url(b"x"), "image_token_id"), (data_url(bytes(2**24)), "bytes")],
)
@pytest.mark.parametrize("show", SHOWING)
async def test_images_are_refused_as_each_client_expects(show: Callable[..., Any], image: str, fact: str) -> None:
    """By its address, by a model of text alone, and in a request that is too large."""
    async with recording("x") as agent:
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match=says(fact)) as refused:
            await show(agent, [image])
        assert (agent.calls, agent.failure) == ([], None)
    error: Any = refused.value
    assert error.status_code == (413 if fact == "bytes" else 400)
    if isinstance(error, anthropic.APIStatusError):
        assert isinstance(error, anthropic.RequestTooLargeError if fact == "bytes" else anthropic.BadRequestError)
        assert error.body["error"]["type"] == ("request_too_large" if fact == "bytes" else "invalid_request_error")
    else:
        assert isinstance(error, openai.APIStatusError if fact == "bytes" else openai.BadRequestError)
        assert error.body["type"] == "invalid_request_error"
