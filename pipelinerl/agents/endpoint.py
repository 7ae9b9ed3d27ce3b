"""An endpoint on loopback, for one rollout, that records every call to it, in three chat APIs.

``llm_async_generate`` samples each call, so tokens, log-probabilities and weight versions are the server's; the agent
only sees text. A request for another temperature than the run's is refused: its ratio to the trained policy would be
wrong. A call that fails for infrastructure reasons ends the rollout with that error, even if the agent handles it. A
call whose client disconnects before the answer is neither recorded nor continued.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from jinja2 import TemplateError

from pipelinerl.agents.chat_completions import ChatCompletions
from pipelinerl.agents.dialect import ChatRequest, CountingDialect, Dialect, Event, sampling_parameters
from pipelinerl.agents.messages import Messages
from pipelinerl.agents.responses import Responses
from pipelinerl.async_llm import is_retryable, llm_async_generate, make_training_texts_from_llm_calls, refuse_too_long
from pipelinerl.chat import renderer_of
from pipelinerl.chat.images import images_of
from pipelinerl.errors import DomainError, PipelineRLError, ServerError, TransportError
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

if TYPE_CHECKING:
    from openai import DefaultAsyncHttpxClient

MAX_BODY_BYTES = 16 * 2**20
"""Longest request: a text of millions of tokens, or some ten photographs."""
WRONG_KEY = "wrong api key: use the api_key of this rollout"
TOO_LARGE = f"the request has more than {MAX_BODY_BYTES} bytes: send fewer or smaller images"


class RecordedAgent:
    """One rollout's endpoint. Pass ``base_url`` or ``anthropic_base_url``, and ``api_key``, to a client.

    ``calls`` holds the LLM calls in the order of their answers.
    """

    def __init__(self, llm: TrainableLLM, session: aiohttp.ClientSession):
        self.llm = llm
        self.api_key = secrets.token_urlsafe(24)
        self.base_url = ""
        self.model = "policy"
        self.calls: list[LLMCall] = []
        self._session = session
        self._started = time.monotonic()
        self.runner: web.AppRunner | None = None

    @cached_property
    def http_client(self) -> "DefaultAsyncHttpxClient":
        """For all asynchronous clients of OpenAI and Anthropic in the rollout, which closes it."""
        from openai import DefaultAsyncHttpxClient

        # On loopback there is no proxy, and no TLS to verify: the default TLS context costs 20 ms. No time limit, since
        # a client would repeat a long answer: the rollout has its own.
        return DefaultAsyncHttpxClient(verify=False, trust_env=False, timeout=None)

    @property
    def anthropic_base_url(self) -> str:
        """The URL for Anthropic's clients, which add ``/v1`` themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which clients of OpenAI and Anthropic find the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    async def answer_on(self, listening: socket.socket) -> None:
        """Also answers on this socket, for example one of another network namespace. Closes it with the endpoint."""
        assert self.runner, "the endpoint is not open"
        await web.SockSite(self.runner, listening).start()

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
        texts = make_training_texts_from_llm_calls(self.llm, self.calls, reward)
        metrics = BaseMetrics(reward=reward, success=success, no_error=True, no_answer=no_answer)
        latency = time.monotonic() - self._started
        return RolloutResult(
            training_texts=texts, metrics=metrics, latency=latency, dataset_name=dataset_name, rewards="rollout"
        )

    async def complete(self, asked: ChatRequest) -> LLMCall:
        """Samples one completion and records it."""
        parameters = sampling_parameters(asked.parameters, self.llm.parameters)
        llm = self.llm.model_copy(update={"parameters": parameters})
        call = await llm_async_generate(llm, Prompt(messages=asked.messages, tools=asked.tools), self._session)
        self.calls.append(call)
        return call

    def count_tokens(self, asked: ChatRequest) -> int:
        """Counts the tokens of a whole rendered prompt. Raises ``DomainError`` for one with images."""
        if images_of(asked.messages):
            raise DomainError("messages have images: only a model's server knows how many tokens it makes of one")
        refuse_too_long(self.llm, asked.messages, asked.tools)
        self.llm.load_tokenizer()
        renderer = renderer_of(self.llm.tokenizer, self.llm.renderer)
        return len(renderer.render(asked.messages, asked.tools, self.llm.chat_template_kwargs).token_ids)


@asynccontextmanager
async def record_agent(llm: TrainableLLM, session: aiohttp.ClientSession) -> AsyncIterator[RecordedAgent]:
    """Opens the endpoint of one rollout.

    Args:
        llm: the policy.
        session: HTTP session of the rollout.

    Example::

        async with record_agent(llm, session) as agent:
            client = AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key, http_client=agent.http_client)
            answer = await my_agent(client, problem)
            return agent.result(reward=score(answer), success=score(answer) == 1)
    """
    agent = RecordedAgent(llm, session)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    messages, responses = Messages(agent.model), Responses(agent.model)
    llm.load_tokenizer()
    chat = ChatCompletions(agent.model, renderer_of(llm.tokenizer).token_text)
    app.router.add_post("/v1/chat/completions", _handler(agent, chat))
    app.router.add_post("/v1/messages", _handler(agent, messages))
    app.router.add_post("/v1/messages/count_tokens", _counter(agent, messages))
    app.router.add_post("/v1/responses", _handler(agent, responses))
    app.router.add_post("/v1/responses/input_tokens", _counter(agent, responses))
    app.router.add_get("/v1/models", _models(agent, chat))
    app.router.add_route("*", "/v1/messages{path:.*}", _unknown(messages))
    app.router.add_route("*", "/{path:.*}", _unknown(chat))
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        agent.runner = runner
        agent.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield agent
    finally:
        if "http_client" in vars(agent):
            await agent.http_client.aclose()
        await runner.cleanup()


def _handler(agent: RecordedAgent, dialect: Dialect) -> Any:
    async def handle(request: web.Request) -> web.StreamResponse:
        def refuse(status: int, message: object) -> web.Response:
            headers = {"x-should-retry": "false"} if status == 502 else None  # OpenAI's and Anthropic's clients obey
            return web.json_response(dialect.error(status, str(message)), status=status, headers=headers)

        if not _authorised(request, agent.api_key):
            return refuse(401, WRONG_KEY)
        try:
            body = json.loads(await request.read())
            asked = dialect.read(body)
            sampling_parameters(body | asked.parameters, agent.llm.parameters)
        except (ValueError, RecursionError) as error:
            return refuse(400, error)
        except web.HTTPRequestEntityTooLarge:
            return refuse(413, TOO_LARGE)
        try:
            call = await agent.complete(asked)
        except (
            ValueError,
            TypeError,
            RecursionError,
            TemplateError,
        ) as error:  # the chat template cannot render the messages
            return refuse(400, error)
        except PipelineRLError as error:
            if isinstance(error, TransportError) and not is_retryable(error):
                return refuse(400, error)
            agent.llm.state.fail(error)
            return refuse(502, error)
        if not asked.stream:
            return web.json_response(dialect.answer(call, asked))
        return await _stream(request, dialect.events(call, asked))

    return handle


def _counter(agent: RecordedAgent, dialect: CountingDialect) -> Any:
    async def handle(request: web.Request) -> web.Response:
        if not _authorised(request, agent.api_key):
            return web.json_response(dialect.error(401, WRONG_KEY), status=401)
        try:
            count = agent.count_tokens(dialect.read_count(json.loads(await request.read())))
        except (ValueError, TypeError, RecursionError, TemplateError, ServerError) as error:
            return web.json_response(dialect.error(400, str(error)), status=400)
        except web.HTTPRequestEntityTooLarge:
            return web.json_response(dialect.error(413, TOO_LARGE), status=413)
        return web.json_response(dialect.count(count))

    return handle


def _models(agent: RecordedAgent, dialect: ChatCompletions) -> Any:
    async def handle(request: web.Request) -> web.Response:
        if not _authorised(request, agent.api_key):
            return web.json_response(dialect.error(401, WRONG_KEY), status=401)
        model = {"id": agent.model, "object": "model", "created": 0, "owned_by": "pipelinerl"}
        return web.json_response({"object": "list", "data": [model]})

    return handle


def _unknown(dialect: Dialect) -> Any:
    async def handle(request: web.Request) -> web.Response:
        message = f"the endpoint of a rollout has no {request.method} {request.path}"
        return web.json_response(dialect.error(404, message), status=404)

    return handle


async def _stream(request: web.Request, events: Iterable[Event]) -> web.StreamResponse:
    """Sends server-sent events. Events without a name, of Chat Completions, end with ``[DONE]``."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    with contextlib.suppress(ConnectionError):  # the client has gone
        await response.prepare(request)
        name = ""
        for name, data in events:
            named = f"event: {name}\n" if name else ""
            await response.write(f"{named}data: {json.dumps(data)}\n\n".encode())
            await asyncio.sleep(0)
        if not name:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response


def _authorised(request: web.Request, api_key: str) -> bool:
    """Whether the request has the key, in OpenAI's or Anthropic's header."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    given = request.headers.get("x-api-key", bearer).encode(errors="surrogateescape")
    return secrets.compare_digest(given, api_key.encode())
