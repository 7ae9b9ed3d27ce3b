"""The language model as a domain sees it: prompts, calls and server settings. Public: its field names are frozen.

``TrainableLLM`` holds no connection. A transport (``async_llm``) carries its requests. The actor and the test kit
install their own transport, and the function behind ``TrainableLLM.agenerate``.
"""

import datetime
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import uuid4

import msgspec
import numpy as np
from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from pipelinerl.chat import ReadText, Turn, renderer_of
from pipelinerl.errors import DomainError
from pipelinerl.rollouts import CallTokens, LazyModel

if TYPE_CHECKING:
    import aiohttp

UNSUPPORTED_PARAMETERS = ("n", "stream", "logprobs", "messages", "tools", "response_format")
TOKEN_VARIABLE = "PIPELINERL_LLM_TOKEN"
"""Environment variable with the bearer token of the inference servers' OpenAI routes."""


class Prompt(BaseModel):
    """Messages (and tools) in OpenAI format. If ``token_ids`` is set, it is sent instead of the rendered messages."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(default_factory=lambda: str(uuid4()))
    tools: list[dict] | None = None
    messages: list[dict] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)
    response_format: dict | type[BaseModel] | None = None
    """None or `{"type": "text"}`. `llm_async_generate` refuses others, which constrain the sampler: tokens would come
    from another distribution than the one that is trained."""

    @staticmethod
    def from_user_message(content: str) -> "Prompt":
        """A prompt of one user message."""
        return Prompt(messages=[{"role": "user", "content": content}])

    def __bool__(self) -> bool:
        return bool(self.messages)


class TokenLogprob(BaseModel):
    """One sampled token."""

    logprob: float
    token_id: int


class FunctionCall(BaseModel):
    """Name and JSON-encoded arguments of a tool call."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One tool call of the model, in OpenAI format."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class LLMOutput(BaseModel):
    """The assistant's message: sampled text without the token that ended it, and the tool calls found in it."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None

    def to_message(self) -> dict[str, Any]:
        """The message to append to a conversation."""
        return self.model_dump(exclude_none=True)


class LLMEvent(BaseModel):
    """A chunk of an answer, the whole answer, or the finished call."""

    chunk: str | None = None
    output: LLMOutput | None = None
    llm_call: "LLMCall | None" = None


class LLMStream:
    """Iterates over the events of one answer, the form that agent frameworks expect, and keeps the call it sees.

    Args:
        generator: the events. None makes a null stream, which is false and cannot be iterated.
        prompt: the prompt of the call.
    """

    def __init__(self, generator: Iterator[LLMEvent] | None, prompt: Prompt):
        self.generator = generator
        self.prompt = prompt
        self.llm_call: LLMCall | None = None

    def __bool__(self) -> bool:
        return self.generator is not None

    def __iter__(self) -> "LLMStream":
        if self.generator is None:
            raise ValueError("a null stream has no events")
        return self

    def __next__(self) -> LLMEvent:
        if self.generator is None:
            raise StopIteration
        event = next(self.generator)
        self.llm_call = event.llm_call or self.llm_call
        return event

    def get_output(self) -> LLMOutput:
        """Returns the first complete answer. Raises ValueError if there is none."""
        output = next((event.output for event in self if event.output), None)
        if output is None:
            raise ValueError("the stream ended without an output")
        return output

    def get_text(self) -> str:
        """Returns the text of the first complete answer. Raises ValueError if it has none."""
        content = self.get_output().content
        if content is None:
            raise ValueError("the output has no text")
        return content

    def get_llm_call(self) -> "LLMCall":
        """Returns the call, reading events until it arrives. Raises ValueError if there is none."""
        while self.llm_call is None and next(self, None) is not None:
            pass
        if self.llm_call is None:
            raise ValueError("the stream ended without its call")
        return self.llm_call


class LLMCall(LazyModel):
    """One call: the prompt, the answer, and the exact tokens with their log-probabilities."""

    timestamp: str = Field(default_factory=lambda: datetime.datetime.now().isoformat())
    prompt: Prompt
    output: LLMOutput
    prompt_length_tokens: int = -1
    output_length_tokens: int = -1
    cached: bool = False
    model_version: int | None = None
    """Oldest weight version that sampled a token of the call. None if the server reports no version."""
    llm_info: dict = Field(default_factory=dict)
    cost: float = 0
    logprobs: list[TokenLogprob] = Field(default_factory=list, exclude=True)

    _texts: tuple[str, str] | None = PrivateAttr(default=None)
    _said: ReadText | None = PrivateAttr(default=None)

    @property
    def texts(self) -> tuple[str, str]:
        """The rendered prompt, and the sampled text with the token that ended it."""
        return self._texts or ("", "")

    @property
    def said(self) -> ReadText:
        """Content, tool calls and thought (``TrainableLLM.reasoning_parser``) in the sampled text."""
        return self._said or ReadText(self.output.content or "", [])

    def attach_texts(self, prompt: str, output: str, said: ReadText) -> None:
        """Sets ``texts`` (the rendered prompt and the sampled output) and ``said``."""
        self._texts, self._said = (prompt, output), said

    @classmethod
    def _lazy_fields(cls) -> dict[str, Callable[[CallTokens], list]]:
        return _CALL_FIELDS


def _token_logprobs(tokens: CallTokens) -> list[TokenLogprob]:
    if tokens.logprobs is None:
        return []
    pairs = zip(tokens.logprobs.tolist(), tokens.completion_ids.tolist(), strict=True)
    return [TokenLogprob.model_construct(logprob=logprob, token_id=token_id) for logprob, token_id in pairs]


_CALL_FIELDS: dict[str, Callable[[CallTokens], list]] = {"logprobs": _token_logprobs}

_TOKENIZERS: dict[str, Any] = {}


def load_tokenizer(name: str) -> Any:
    """Loads a Hugging Face tokenizer by name or folder, once per process and without importing torch."""
    tokenizer = _TOKENIZERS.get(name)
    if tokenizer is None:
        from transformers import PreTrainedTokenizerFast

        path = Path(name)
        if path.is_dir() and not (path / "tokenizer.json").exists():
            raise FileNotFoundError(f"tokenizer {name!r} has no tokenizer.json: save it as a fast tokenizer first")
        tokenizer = _TOKENIZERS[name] = PreTrainedTokenizerFast.from_pretrained(name)
    return tokenizer


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One completion to sample. Requests with equal ``key`` may share an HTTP request with ``n`` > 1."""

    token_ids: np.ndarray
    """int32 [P]"""
    body_key: bytes
    """JSON of the sampling parameters."""
    model: str
    retries: int
    base_delay_s: float

    prefix_version: int | None = None
    """Weight version of the first token of the conversation that the prompt continues."""
    images: tuple[bytes, ...] = ()
    """Encoded images of the prompt."""
    image_spans: np.ndarray | None = None
    """int32 [I, 2]: (start, end exclusive) of the tokens that stand for each image. None without images."""

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.token_ids.tobytes() + b"".join(
            hashlib.sha256(image).digest() for image in self.images
        ), self.body_key


class Transport(Protocol):
    """Carries requests to a model."""

    async def generate(
        self, llm: "TrainableLLM", request: GenerateRequest, session: "aiohttp.ClientSession"
    ) -> CallTokens:
        """Samples one completion.

        Args:
            llm: the model that asks, for its ``base_url`` and ``api_token``.
            request: prompt and sampling parameters.
            session: HTTP session of the rollout.
        Raises:
            TransportError: no server answered within ``request.retries``.
        """
        ...


@dataclass
class RolloutState:
    """The shared state of a rollout's LLM calls. The actor makes one for every attempt."""

    transport: Transport | None = None
    """Carries the requests. None: each goes to ``TrainableLLM.base_url``."""
    turns: list[Turn] | None = None
    """The calls so far, whose tokens a later prompt continues. None: every prompt is rendered whole."""
    generate: "Callable[[TrainableLLM, Prompt, aiohttp.ClientSession], Awaitable[LLMCall]] | None" = None
    """``async_llm.llm_async_generate``, which ``TrainableLLM.agenerate`` calls. None: that method raises."""
    name: str = ""
    """Name of the rollout. A seed in ``TrainableLLM.parameters`` is combined with it and the call's index."""
    hint: str | None = None
    """A text of the problem that a teacher sees after the last user message, and the policy does not."""
    environment_file: Path | None = None
    """Keeps the steps of the rollout's first environment over a crash. None: not kept, or that environment has it."""
    num_calls: int = 0
    num_forks: int = 0
    """Prompts that left sampled tokens of their conversation behind (``chat.left_turn``)."""
    num_compacted: int = 0
    """Such prompts that are shorter than the one before them in their conversation, in the place of a fork."""
    sent_tokens: int = 0
    """Prompt tokens of all calls. The server took ``cached_tokens`` of them from its prefix cache."""
    cached_tokens: int = 0
    failure: BaseException | None = None
    """An infrastructure error. It fails the rollout even if the domain's code handles it."""

    def begin_call(self) -> int:
        """Counts a call and returns its index."""
        self.num_calls += 1
        return self.num_calls - 1

    def add_prompt_tokens(self, sent: int, cached: int) -> None:
        """Adds the prompt tokens of an answered call."""
        self.sent_tokens += sent
        self.cached_tokens += cached

    def fail(self, error: BaseException) -> None:
        """Makes the rollout fail, even if the domain's or the agent's code handles the error."""
        self.failure = error


class TrainableLLM(BaseModel):
    """An inference server and how to sample from it.

    Example:
        >>> llm = TrainableLLM(base_url="http://127.0.0.1:8000", model_name="policy", tokenizer_name="Qwen/Qwen2.5-7B",
        ...                    parameters={"max_tokens": 512, "temperature": 1.0}, collect_logprobs=True)
    """

    base_url: str = ""
    model_name: str
    tokenizer_name: str = ""
    """Name or folder of the tokenizer. Empty: ``model_name``."""
    tokenizer: Any = None
    parameters: dict = Field(default_factory=dict)
    """Sampling parameters of the request (``max_tokens``, ``temperature``, ``stop``, …)."""
    context_size: int = 32000
    """Longest prompt + completion that the server accepts, in tokens."""
    collect_logprobs: bool = False
    """Whether to request log-probabilities. Training texts need them."""
    chat_template_kwargs: dict = Field(default_factory=dict)
    renderer: str = ""
    """Family of the package `renderers` that renders prompts. Empty: the tokenizer's chat template does."""
    tool_parser: str = ""
    """Format of tool calls. Empty: Hermes. Otherwise the name of vLLM's parser (``--tool-call-parser``)."""
    reasoning_parser: str = ""
    """Format of thoughts. Empty: they stay in the content. Otherwise the name of vLLM's (``--reasoning-parser``)."""
    api_token: str = Field(default_factory=lambda: os.environ.get(TOKEN_VARIABLE, ""), exclude=True)
    max_retries: int = 5
    """How often a request that failed in transport is repeated."""
    base_delay: float = 0.5
    """Seconds before the first repetition. Every further delay is twice as long."""

    _state: RolloutState = PrivateAttr(default_factory=RolloutState)

    @property
    def state(self) -> RolloutState:
        """State of the rollout. Copies of the model that a domain makes (``model_copy``) share it."""
        private = self.__pydantic_private__
        assert private is not None
        return private["_state"]  # ten times as fast as pydantic's own lookup, and every call asks often

    def bind(self, state: RolloutState) -> None:
        """Makes all further calls part of another rollout."""
        self._state = state

    def load_tokenizer(self) -> None:
        """Loads ``tokenizer`` unless it is loaded already."""
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.tokenizer_name or self.model_name)

    def count_tokens(self, messages: list[dict] | str) -> int:
        """Counts the tokens of a text, or of messages rendered with the chat template."""
        self.load_tokenizer()
        renderer = renderer_of(self.tokenizer, self.renderer)
        if isinstance(messages, str):
            return len(renderer.encode(messages))
        return len(renderer.render(messages, None, self.chat_template_kwargs).token_ids)

    async def agenerate(self, prompt: Any, session: "aiohttp.ClientSession") -> LLMStream:
        """Samples one completion, for the agents of tapeagents (``Agent.arun``).

        Args:
            prompt: a ``Prompt``, or the framework's object with the same fields.
            session: HTTP session of the rollout.
        Returns:
            A stream of one event with output and call. Pass the call to ``make_training_text``.
        Raises:
            DomainError: the model does not belong to a rollout. Call ``llm_async_generate`` instead.
        """
        if self.state.generate is None:
            raise DomainError("`agenerate` needs the model that a rollout function gets: call `llm_async_generate`")
        own = prompt if isinstance(prompt, Prompt) else Prompt(**prompt.model_dump(exclude_none=True))
        call = await self.state.generate(self, own, session)
        return LLMStream(iter([LLMEvent(output=call.output, llm_call=call)]), own)

    def generate(self, prompt: Any, **kwargs: Any) -> LLMStream:
        """Raises ``DomainError``: a blocking call would stop every rollout of the worker."""
        raise DomainError(
            "`TrainableLLM.generate` blocks and is not here: run the agent with `async_execute_agent` or `agent.arun`, "
            "which await `agenerate`, or give a blocking agent an address with `pipelinerl.agents.run_agent`"
        )

    def make_training_text(self, prompt: Any, output: Any) -> Any:
        """Raises ``DomainError``: prompt and output have no tokens."""
        raise DomainError(
            "`TrainableLLM.make_training_text` would tokenise the text again and train tokens that were not sampled: "
            "set the agent's `store_llm_calls`, and give `async_llm.make_training_text` the calls of its steps"
        )


def sampling_params(llm: TrainableLLM, max_tokens: int | None = None) -> bytes:
    """Returns JSON of the parameters of the next call. Raises ``DomainError`` for an unsupported one."""
    params = _plain(llm.parameters)
    refused = [name for name in UNSUPPORTED_PARAMETERS if name in params]
    if refused:
        raise DomainError(f"llm.parameters holds {refused[0]!r}, which the token interface does not take: remove it")
    if "max_completion_tokens" in params:
        params["max_tokens"] = params.pop("max_completion_tokens")
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    if llm.collect_logprobs:
        params["logprobs"] = 0
    params["detokenize"] = bool(params.get("stop"))
    if params.get("seed") is not None and llm.state.name:
        params["seed"] = _call_seed(params["seed"], llm.state.name, llm.state.num_calls)
    return msgspec.json.encode(params)


def _call_seed(seed: int, rollout: str, call: int) -> int:
    """Derives a separate seed for every call of every rollout. With one seed, a group's attempts would be equal."""
    digest = hashlib.blake2b(f"{seed}/{rollout}/{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # vLLM takes int64


def _plain(value: Any) -> Any:
    if isinstance(value, (DictConfig, ListConfig)):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
