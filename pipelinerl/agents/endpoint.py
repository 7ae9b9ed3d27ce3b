"""An OpenAI-compatible endpoint on loopback that exists for one rollout and records every call made to it.

Owns the listening socket and the recorded calls. Each call is sampled by ``llm_async_generate``, so its tokens,
log-probabilities and weight versions are those of the server. The agent only sees text. The run's sampling parameters
are binding: a request for another temperature is refused, because its ratio to the trained policy would be wrong. A
call that fails for infrastructure reasons ends the rollout with that error, even if the agent handles it.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import aiohttp
import msgspec
from aiohttp import web
from jinja2 import TemplateError

from pipelinerl.async_llm import is_retryable, llm_async_generate, make_training_text
from pipelinerl.config.rules import DISTORTING
from pipelinerl.errors import DomainError, PipelineRLError, TransportError
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

MAX_BODY_BYTES = 16 * 2**20
PASSED_PARAMETERS = ("max_tokens", "max_completion_tokens", "stop", "seed")
FIXED_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
)


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any]


class _ToolCall(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    """The fields of a request that are checked. Other fields are ignored here."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class RecordedAgent:
    """One rollout's endpoint. Give ``base_url`` and ``api_key`` to an OpenAI client.

    ``calls`` holds the LLM calls in the order in which they were answered.
    """

    def __init__(self, llm: TrainableLLM, session: aiohttp.ClientSession):
        self.llm = llm
        self.api_key = secrets.token_urlsafe(24)
        self.base_url = ""
        self.model = "policy"
        self.calls: list[LLMCall] = []
        self._session = session
        self._started = time.monotonic()

    @property
    def failure(self) -> BaseException | None:
        """The error of a call that failed for infrastructure reasons."""
        return self.llm.state.failure

    def result(
        self, *, reward: float, success: bool, dataset_name: str | None = None, no_answer: bool = False
    ) -> RolloutResult:
        """Builds the result from all calls, with one reward for the whole rollout.

        Args:
            reward: of the rollout, set on every text.
            success: whether the task was solved.
            dataset_name: groups the metrics.
            no_answer: whether the agent gave no answer.
        Raises:
            PipelineRLError: a call failed for infrastructure reasons (that call's error).
            DomainError: the agent made no call.
        """
        if self.failure is not None:
            raise self.failure
        if not self.calls:
            raise DomainError(
                "the agent made no call to llm.base_url, so there is nothing to train: check its base_url"
            )
        texts = [make_training_text(self.llm, call) for call in self.calls]
        for text in texts:
            text.reward = reward
        metrics = BaseMetrics(reward=reward, success=success, no_error=True, no_answer=no_answer)
        latency = time.monotonic() - self._started
        return RolloutResult(
            training_texts=texts, metrics=metrics, latency=latency, dataset_name=dataset_name, rewards="rollout"
        )

    async def complete(self, body: dict[str, Any]) -> LLMCall:
        """Samples one completion for an OpenAI request body and records it."""
        llm = self.llm.model_copy(update={"parameters": sampling_parameters(body, self.llm.parameters)})
        prompt = Prompt(messages=body["messages"], tools=body.get("tools") or None)
        call = await llm_async_generate(llm, prompt, self._session)
        self.calls.append(call)
        return call


def sampling_parameters(body: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Merges the parameters that an agent may choose (length, stop strings, seed) into the run's.

    Args:
        body: OpenAI request body.
        parameters: the run's sampling parameters.
    Raises:
        ValueError: the request would sample from another distribution than the one that is trained.
    """
    for name in FIXED_PARAMETERS:
        wanted = body.get(name)
        accepted = (parameters[name],) if name in parameters else DISTORTING.get(name, (1.0,))
        if wanted is not None and wanted not in accepted:
            raise ValueError(
                f"{name} is {wanted!r} but this run samples with {accepted[0]!r}: leave it out of the request, "
                f"or set llm.parameters.{name} for the whole run"
            )
    if body.get("n") not in (None, 1):
        raise ValueError(f"n is {body['n']!r}: one completion per request; the run's attempts are separate rollouts")
    chosen = {name: body[name] for name in PASSED_PARAMETERS if body.get(name) is not None}
    if "max_completion_tokens" in chosen:
        chosen["max_tokens"] = chosen.pop("max_completion_tokens")
    return parameters | chosen


def check_body(body: Any) -> dict[str, Any]:
    """Returns the request body if it is valid. Raises ``ValueError`` with the reason otherwise."""
    msgspec.convert(body, _Request)
    return body


def response_message(call: LLMCall) -> dict[str, Any]:
    """Returns the assistant message of a call in OpenAI format."""
    message: dict[str, Any] = {"role": "assistant", "content": without_stop(call)}
    if call.output.tool_calls:
        message["tool_calls"] = [_plain(tool_call) for tool_call in call.output.tool_calls]
    return message


def without_stop(call: LLMCall) -> str | None:
    """Returns the text before the first stop string, because OpenAI's API omits it. Domains and training keep it."""
    content, stop = call.output.content, call.llm_info["parameters"].get("stop") or []
    if content is None:
        return None
    starts = [content.index(end) for end in ([stop] if isinstance(stop, str) else stop) if end in content]
    return content[: min(starts, default=None)]


def finish_reason(call: LLMCall) -> str:
    return "tool_calls" if call.output.tool_calls else str(call.llm_info.get("finish_reason") or "stop")


def chat_completion(call: LLMCall, model: str) -> dict[str, Any]:
    """Builds a `chat.completion` object."""
    choice = {"index": 0, "message": response_message(call), "finish_reason": finish_reason(call), "logprobs": None}
    return _envelope("chat.completion", model) | {"choices": [choice], "usage": _usage(call)}


def chunks(call: LLMCall, model: str, include_usage: bool) -> list[dict[str, Any]]:
    """Builds the `chat.completion.chunk` objects of a streamed answer: role, content, tool calls, end, usage.

    Args:
        call: the finished call.
        model: name of the model in the answer.
        include_usage: whether a last object holds the token counts.
    """
    envelope = _envelope("chat.completion.chunk", model)
    message = response_message(call)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    deltas += [
        {"tool_calls": [{"index": index} | tool_call]} for index, tool_call in enumerate(message.get("tool_calls", []))
    ]
    parts = [envelope | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    parts.append(envelope | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason(call)}]})
    if include_usage:
        parts.append(envelope | {"choices": [], "usage": _usage(call)})
    return parts


@asynccontextmanager
async def record_agent(llm: TrainableLLM, session: aiohttp.ClientSession) -> AsyncIterator[RecordedAgent]:
    """Opens the endpoint of one rollout.

    Args:
        llm: the policy.
        session: HTTP session of the rollout.

    Example::

        async with record_agent(llm, session) as agent:
            client = AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key)
            answer = await my_agent(client, problem)
            return agent.result(reward=score(answer), success=score(answer) == 1)
    """
    agent = RecordedAgent(llm, session)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/chat/completions", _handler(agent))
    app.router.add_get("/v1/models", _models(agent))
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        agent.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield agent
    finally:
        await runner.cleanup()


def _handler(agent: RecordedAgent) -> Any:
    async def handle(request: web.Request) -> web.StreamResponse:
        if not _authorised(request, agent.api_key):
            return _error(401, "wrong api key: use the api_key of this rollout", "authentication_error")
        try:
            body = check_body(json.loads(await request.read()))
            sampling_parameters(body, agent.llm.parameters)
        except (ValueError, RecursionError) as error:
            return _error(400, str(error), "invalid_request_error")
        try:
            call = await agent.complete(body)
        except (ValueError, TypeError, TemplateError) as error:  # the chat template cannot render the messages
            return _error(400, str(error), "invalid_request_error")
        except PipelineRLError as error:
            if isinstance(error, TransportError) and not is_retryable(error):
                return _error(400, str(error), "invalid_request_error")
            agent.llm.state.fail(error)
            return _error(502, str(error), "server_error")
        if not body.get("stream"):
            return web.json_response(chat_completion(call, agent.model))
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return await _stream(request, chunks(call, agent.model, include_usage))

    return handle


def _models(agent: RecordedAgent) -> Any:
    async def handle(request: web.Request) -> web.Response:
        if not _authorised(request, agent.api_key):
            return _error(401, "wrong api key: use the api_key of this rollout", "authentication_error")
        model = {"id": agent.model, "object": "model", "created": 0, "owned_by": "pipelinerl"}
        return web.json_response({"object": "list", "data": [model]})

    return handle


async def _stream(request: web.Request, parts: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for part in parts:
        await response.write(f"data: {json.dumps(part)}\n\n".encode())
        await asyncio.sleep(0)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _authorised(request: web.Request, api_key: str) -> bool:
    given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    return secrets.compare_digest(given, f"Bearer {api_key}".encode())


def _error(status: int, message: str, kind: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": None, "param": None}}, status=status)


def _envelope(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": int(time.time()), "model": model}


def _usage(call: LLMCall) -> dict[str, int]:
    prompt, output = call.prompt_length_tokens, call.output_length_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
