"""Agents that exist: the official OpenAI client (streaming, tools, sync) and a program, recorded."""

import asyncio
import collections
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import anthropic
import openai
import psutil
import pytest

from pipelinerl.agents import play_text_environment, record_agent, run_agent, run_agent_process
from pipelinerl.agents.endpoint import sampling_parameters
from pipelinerl.agents.run import agent_environment
from pipelinerl.errors import DomainError, ServerError, TransportError
from pipelinerl.rollouts import RolloutResult
from pipelinerl.testing import FakeLLM

CALCULATOR = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def scripted(*lines: str) -> FakeLLM:
    return FakeLLM.saying(lines, parameters={"temperature": 1.0, "max_tokens": 128})


def unreachable(prompt: str) -> str:
    raise TransportError("http://127.0.0.1:9: connection refused")


async def test_record_agent_streaming_client_with_tools_yields_exact_tokens():
    tool_call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    llm = scripted(tool_call, "it is 3")
    async with aiohttp.ClientSession() as session, record_agent(llm, session) as agent:
        async with openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client:
            messages: list = [{"role": "user", "content": "1 + 2?"}]
            first = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
            call = first.choices[0].message.tool_calls[0]
            assert first.choices[0].finish_reason == "tool_calls"
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
            messages += [first.choices[0].message.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"}]
            stream = await client.chat.completions.create(
                model="any", messages=messages, tools=[CALCULATOR], stream=True, stream_options={"include_usage": True}
            )
            parts = [part async for part in stream]
        result = agent.result(reward=1.0, success=True, dataset_name="train")
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "it is 3"
    assert parts[-1].usage.completion_tokens == len(llm.tokenizer.encode("it is 3<|im_end|>"))
    first_text, second_text = result.training_texts
    assert first_text.output_text == tool_call + "<|im_end|>"
    assert second_text.input_ids[: len(first_text.input_ids)] == first_text.input_ids
    assert second_text.output_text == "it is 3<|im_end|>"
    assert [text.reward for text in result.training_texts] == [1.0, 1.0]


async def test_clients_of_a_rollout_share_an_http_client_that_ends_with_it(monkeypatch):
    monkeypatch.setattr("httpcore2.default_ssl_context", None)  # costs 20 ms
    messages = [{"role": "user", "content": "hi"}]
    async with aiohttp.ClientSession() as session, record_agent(scripted("a", "b"), session) as agent:
        shared = {"api_key": agent.api_key, "http_client": agent.http_client}
        for client in (
            openai.AsyncOpenAI(base_url=agent.base_url, **shared).chat.completions,
            anthropic.AsyncAnthropic(base_url=agent.anthropic_base_url, **shared).messages,
        ):
            await client.create(model="m", messages=messages, max_tokens=9)
    assert len(agent.calls) == 2
    assert agent.http_client.is_closed


async def test_run_agent_synchronous_client_runs_in_a_thread():
    def agent(base_url: str, api_key: str) -> str:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return answer.choices[0].message.content

    async with aiohttp.ClientSession() as session:
        result = await run_agent(scripted("hello"), session, agent, lambda a: (float(a == "hello"), a == "hello"))
    assert result.metrics.reward == 1.0
    assert result.training_texts[0].output_text == "hello<|im_end|>"


async def test_run_agent_process_reads_the_environment_and_sees_no_secret(monkeypatch):
    for name in (
        "PIPELINERL_SECRET",
        "PIPELINERL_REDIS_PASSWORD",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
    ):
        monkeypatch.setenv(name, "do not tell")
    monkeypatch.setenv("PIPELINERL_RUN", "mark")
    monkeypatch.setenv("PIPELINERL_ROLE", "mark/actor_0")
    program = (
        "import json, os, urllib.request\n"
        "assert 'do not tell' not in os.environ.values(), os.environ\n"
        "assert (os.environ['PIPELINERL_RUN'], os.environ['PIPELINERL_ROLE']) == ('mark', 'mark/actor_0')\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': input()}]}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, headers)\n"
        "print(json.load(urllib.request.urlopen(request))['choices'][0]['message']['content'])\n"
    )
    async with aiohttp.ClientSession() as session:
        result = await run_agent_process(
            scripted("42"),
            session,
            [sys.executable, "-c", program],
            lambda out: (1.0, out == "42\n"),
            stdin="the answer?",
        )
    assert result.metrics.success
    assert "the answer?" in result.training_texts[0].prompt_text


async def test_agent_environment_holds_what_is_passed():
    ours = {"MY_TOOL_URL": "u", "PATH": "p", "LC_ALL": "C", "OPENAI_API_KEY": "ours", "PIPELINERL_RUN": "m"}
    async with aiohttp.ClientSession() as session, record_agent(scripted("x"), session) as recorded:
        told = {"OPENAI_BASE_URL": recorded.base_url, "OPENAI_API_KEY": recorded.api_key, "PIPELINERL_RUN": "m"}
        told |= dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1")
        told |= {"ANTHROPIC_BASE_URL": recorded.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": recorded.api_key}
        assert agent_environment(ours, recorded, {}) == told | {"PATH": "p", "LC_ALL": "C"}
        assert agent_environment(ours, recorded, {"A": "b"}, ["MY_*"]) == told | {"MY_TOOL_URL": "u", "A": "b"}
        ours |= {"NO_PROXY": "localhost,127.0.0.1,::1,node-0"}
        found = agent_environment(ours, recorded, {"HTTP_PROXY": "http://p:1", "no_proxy": "mine"})
        assert found["no_proxy"] == "mine,localhost,127.0.0.1,::1,node-0"


def test_run_agent_process_ends_with_its_worker():
    worker = """
import asyncio, os, signal, sys
import aiohttp
from pipelinerl.agents import run_agent_process
from tests.integration.test_agents import scripted
async def main():
    async with aiohttp.ClientSession() as session:
        code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
        command = [sys.executable, "-c", code, sys.argv[1]]
        await run_agent_process(scripted("x"), session, command, lambda out: (1.0, True))
asyncio.run(main())
"""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "pid"
        process = subprocess.Popen([sys.executable, "-c", worker, str(told)])
        deadline = time.monotonic() + 60
        while not (told.exists() and told.read_text().strip()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        agent = psutil.Process(int(told.read_text()))
        process.kill()
        process.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.wait(timeout=60)
        assert not agent.is_running()


async def test_run_agent_process_failing_program_is_a_domain_error():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(DomainError, match="status 3: broken"):
            await run_agent_process(
                scripted("x"),
                session,
                [sys.executable, "-c", "import sys; sys.stderr.write('broken'); sys.exit(3)"],
                lambda out: (0.0, False),
            )


async def test_record_agent_failed_server_never_becomes_a_reward():
    """The client, which would try twice more, is told not to: the rollout is lost."""
    asked = []

    def fail(prompt: str) -> str:
        asked.append(prompt)
        return unreachable(prompt)

    async with aiohttp.ClientSession() as session, record_agent(FakeLLM.saying(fail), session) as agent:
        async with openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client:
            with pytest.raises(openai.InternalServerError, match="connection refused"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert len(asked) == 1
        with pytest.raises(TransportError, match="connection refused"):
            agent.result(reward=0.0, success=False)


async def test_failed_server_is_blamed_when_the_agent_raises():
    """The exception that leaves the domain is the client's; the actor asks the llm what was behind it."""
    llm = FakeLLM.saying(unreachable)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(openai.InternalServerError):
            async with (
                record_agent(llm, session) as agent,
                openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0) as client,
            ):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert isinstance(llm.state.failure, TransportError)


@pytest.mark.parametrize("stop", ["Observation:", ["END", "Observation:"]])
async def test_stop_string_ends_the_answer_and_is_no_part_of_it(stop):
    async with aiohttp.ClientSession() as session, record_agent(scripted("look\nObservation: it"), session) as agent:
        async with openai.AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key) as client:
            messages: list = [{"role": "user", "content": "hi"}]
            answer = await client.chat.completions.create(model="m", messages=messages, stop=stop)
        assert agent.calls[0].output.content == "look\nObservation:"  # as domains of PipelineRL know it
        (text,) = agent.result(reward=1.0, success=True).training_texts
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("look\n", "stop")
    assert text.output_text == "look\nObservation:"  # what was sampled is trained


async def test_synchronous_agents_that_never_return_hold_up_no_other():
    """More of them than the loop's default executor has threads."""
    forever = threading.Event()

    def answer(base_url: str, api_key: str) -> str:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return "done"

    async with aiohttp.ClientSession() as session:

        async def run(agent) -> RolloutResult:
            return await run_agent(scripted("x"), session, agent, lambda said: (1.0, said == "done"))

        stuck = [asyncio.create_task(run(lambda *_: forever.wait())) for _ in range(40)]
        result = await run(answer)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
    forever.set()
    assert result.metrics.success


async def test_exception_of_a_synchronous_agent_is_raised_where_it_is_awaited():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ZeroDivisionError):
            await run_agent(scripted("x"), session, lambda *_: 1 // 0, lambda said: (1.0, True))


async def test_run_agent_process_leaves_no_process_behind():
    program = (
        "import json, os, subprocess, sys, urllib.request\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=subprocess.DEVNULL,\n"
        "                         stderr=subprocess.DEVNULL)\n"
        "body = json.dumps({'messages': [{'role': 'user', 'content': 'x'}]}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "urllib.request.urlopen(urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, "
        "headers)).read()\n"
        "sys.stdout.buffer.write(b'%d \\xff' % child.pid)\n"
    )
    printed = []

    def score(out: str) -> tuple[float, bool]:
        printed.append(out)
        return 1.0, True

    async with aiohttp.ClientSession() as session:
        await run_agent_process(scripted("x"), session, [sys.executable, "-c", program], score)
    pid, undecodable = printed[0].split()
    assert undecodable == "\ufffd"
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(timeout=60)
    assert not psutil.pid_exists(int(pid))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "Expecting property name"),
        (b"[]", 400, "Expected `object`, got `array`"),
        (b'{"messages": []}', 400, "Expected `array` of length >= 1 - at `$.messages`"),
        (b'{"messages": [{"content": "x"}]}', 400, "missing required field `role` - at `$.messages[0]`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": 3}', 400, "got `int` - at `$.tools`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 0.2}', 400, "temperature is 0.2"),
        (b'{"messages": [{"role": "user", "content": "x"}], "min_tokens": 5}', 400, "min_tokens is 5"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 4}', 400, "n is 4"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "image_url"),
    ],
)
async def test_record_agent_bad_request_is_refused_with_a_reason(body, status, message):
    async with aiohttp.ClientSession() as session, record_agent(scripted("x"), session) as agent:
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        async with session.post(f"{agent.base_url}/chat/completions", data=body, headers=headers) as response:
            assert response.status == status
            assert message in (await response.json())["error"]["message"]
        async with session.post(f"{agent.base_url}/chat/completions", data=body) as response:
            assert response.status == 401


TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
REQUEST = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ],
    "tools": [TOOL],
    "max_tokens": 5,
    "stop": ["x"],
    "seed": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
}
JUNK = (None, True, -1, 0, 2**70, 1e308, "", "x", "\ud800", [], [[]], {}, {"role": 3}, [None], {"a": {}})


def fuzzed(value: object, rng: random.Random) -> object:
    """The value with something in it replaced, left out or wrapped."""
    if rng.random() < 0.15 or not isinstance(value, list | dict) or not value:
        return rng.choice((*JUNK, [value], {"content": value}))
    copy = dict(value) if isinstance(value, dict) else list(value)
    key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    if rng.random() < 0.15:
        del copy[key]
    else:
        copy[key] = fuzzed(copy[key], rng)
    return copy


def fuzzed_bodies(count: int) -> Iterator[bytes]:
    rng = random.Random(4)
    yield b"[" * 200_000
    yield b'{"messages": ' + b"1" * 5000 + b"}"
    for _ in range(count):
        body = REQUEST
        for _ in range(rng.randint(1, 3)):
            body = fuzzed(body, rng)
        encoded = bytearray(json.dumps(body).encode())
        for _ in range(rng.choice((0, 0, 0, 2))):
            encoded[rng.randrange(len(encoded))] = rng.randrange(256)
        yield bytes(encoded)


async def test_record_agent_fuzzed_bodies_are_answered_or_refused_and_never_fail_the_rollout():
    llm = FakeLLM.saying(lambda prompt: "fine", parameters={"temperature": 1.0, "max_tokens": 64})
    statuses = collections.Counter()
    async with aiohttp.ClientSession() as session, record_agent(llm, session) as agent:
        url, headers = f"{agent.base_url}/chat/completions", {"Authorization": f"Bearer {agent.api_key}"}
        for body in fuzzed_bodies(600):
            async with session.post(url, data=body, headers=headers) as response:
                assert response.status in (200, 400), (response.status, body[:500], await response.text())
                statuses[response.status] += 1
                await response.read()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(agent.base_url.split(":")[2].split("/")[0]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 40")
        writer.close()
        assert agent.failure is None
    assert min(statuses[200], statuses[400]) > 50


async def test_record_agent_parameter_that_the_server_refuses_is_a_bad_request():
    def refuse(prompt: str) -> str:
        raise ServerError("max_tokens must be at least 1", 400)

    async with aiohttp.ClientSession() as session, record_agent(FakeLLM.saying(refuse), session) as agent:
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": -3}
        async with session.post(f"{agent.base_url}/chat/completions", json=body, headers=headers) as response:
            assert response.status == 400
            assert "at least 1" in (await response.json())["error"]["message"]
        assert agent.failure is None


def test_sampling_parameters_length_and_stop_are_the_agents_to_choose():
    ours = {"temperature": 0.7, "max_tokens": 100}
    body = {"temperature": 0.7, "top_p": 1, "max_completion_tokens": 5, "stop": ["\n"]}
    assert sampling_parameters(body, ours) == {"temperature": 0.7, "max_tokens": 5, "stop": ["\n"]}


async def test_play_text_environment_conversation_is_one_growing_sequence():
    class Countdown:
        def reset(self, *, seed=None, options=None):
            self.left = 2
            return "2 left", {}

        def step(self, action):
            self.left -= 1
            return f"{self.left} left, you said {action}", 0.5, self.left == 0, False, {"success": self.left == 0}

    async with aiohttp.ClientSession() as session:
        result = await play_text_environment(scripted("a", "b"), session, Countdown(), max_turns=5, seed=1)
    assert (result.metrics.reward, result.metrics.success) == (1.0, True)
    first, second = result.training_texts
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    assert "1 left, you said a" in second.prompt_text
