"""The common part of the endpoint's dialects: a request in plain form, and the part of an answer that an agent sees."""

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipelinerl.config.rules.rollouts import DISTORTING
from pipelinerl.llm import LLMCall

PASSED_PARAMETERS = ("max_tokens", "max_completion_tokens", "stop", "seed")
FIXED_PARAMETERS = ("temperature", *DISTORTING)
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),  # the run's attempts are separate rollouts
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "functions": ([],),  # `tools` took their place
    "function_call": ("none",),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "logits_processors": ([],),
}
"""Fields of OpenAI's APIs and of vLLM that would change prompt or answer, with their values that change nothing."""
GUIDED = "guided_"
"""Prefix of vLLM's older fields for constrained sampling."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request of any dialect, in the form of Chat Completions."""

    messages: list[dict[str, Any]]
    num_instructions: int = 0
    """Responses: messages at the beginning that apply to this request only."""
    tools: list[dict[str, Any]] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters, by the names of Chat Completions."""
    stream: bool = False
    include_usage: bool = False
    """Chat Completions: a streamed answer ends with its token counts."""
    logprobs: bool = False
    thoughts: bool = True
    """Whether the agent wants to see thoughts."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """The part of an answer that an agent sees."""

    thought: str
    content: str | None
    """None: the answer only has tool calls."""
    tool_calls: list[dict[str, Any]]
    """In the format of Chat Completions."""
    stop: str | None
    """The stop string that ended it. OpenAI's and Anthropic's APIs leave it out of the content."""
    cut: bool
    """Whether it was cut for its length."""


Event = tuple[str, dict[str, Any]]
"""Name and data of a server-sent event. The name is empty in Chat Completions."""


class Dialect(Protocol):
    """One chat API: reads its requests and writes its answers. It samples nothing and does no I/O."""

    def read(self, body: Any) -> ChatRequest:
        """Returns the request. Raises ``ValueError`` if it is not valid, or the endpoint does not support it."""
        ...

    def answer(self, call: LLMCall, asked: ChatRequest) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""
        ...

    def events(self, call: LLMCall, asked: ChatRequest) -> Iterable[Event]:
        """Returns the events of a streamed answer."""
        ...

    def error(self, status: int, message: str) -> dict[str, Any]:
        """Returns the body of a refusal."""
        ...


class CountingDialect(Dialect, Protocol):
    """A chat API that also counts the tokens of a prompt."""

    def read_count(self, body: Any) -> ChatRequest:
        """Returns the request whose tokens are counted. Raises ``ValueError`` if it is not valid."""
        ...

    def count(self, num_tokens: int) -> dict[str, Any]:
        """Returns the body of the answer."""
        ...


def sampling_parameters(body: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Merges the parameters that an agent may choose (length, stop strings, seed) into the run's.

    Args:
        body: request body with OpenAI's names.
        parameters: the run's sampling parameters. Their `max_tokens` is an upper bound.
    Raises:
        ValueError: the request would sample from another distribution than the one that is trained.
    """
    for name in FIXED_PARAMETERS:
        wanted = body.get(name)
        accepted = (parameters[name],) if name in parameters else DISTORTING.get(name, (1.0,))
        if wanted is not None and wanted not in accepted:
            has = f"samples with {accepted[0]!r}" if accepted else "samples without it"
            raise ValueError(
                f"{name} is {wanted!r} but this run {has}: leave it out of the request, "
                f"or set llm.parameters.{name} for the whole run"
            )
    for name, wanted in body.items():
        if wanted not in (None, *UNSERVED.get(name, (wanted,))) or (wanted and name.startswith(GUIDED)):
            raise ValueError(
                f"{name} is {str(wanted)[:200]}: one answer per request, to the whole conversation, by the run's "
                "template, with `tools` and without constraints; leave it out of the request"
            )
    chosen = {name: body[name] for name in PASSED_PARAMETERS if body.get(name) is not None}
    if "max_completion_tokens" in chosen:
        chosen["max_tokens"] = chosen.pop("max_completion_tokens")
    if "max_tokens" in chosen:  # Anthropic's clients have to send a length, and choose one themselves
        chosen["max_tokens"] = min(chosen["max_tokens"], parameters.get("max_tokens", chosen["max_tokens"]))
    return parameters | chosen


def refuse_format(name: str, wanted: Any) -> None:
    """Raises ``ValueError`` for a format other than text. ``name``: the request's field."""
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind not in (None, "text"):
        raise ValueError(
            f"{name} is {kind!r}: a constrained sampler has another distribution than the one that is trained; ask for "
            "the format in the prompt, or offer a tool with that schema"
        )


def said_of(call: LLMCall) -> Said:
    """Returns the part of a call's answer that the agent sees."""
    said = call.said
    content: str | None = said.content
    if call.output.tool_calls:
        content = call.output.content
    ending = call.llm_info["parameters"].get("stop") or []
    stops = [end for end in ([ending] if isinstance(ending, str) else ending) if end in (content or "")]
    stop = min(stops, key=(content or "").index, default=None)
    return Said(
        thought=said.thought,
        content=content.partition(stop)[0] if content is not None and stop else content,
        tool_calls=[plain(tool_call) for tool_call in call.output.tool_calls or []],
        stop=stop,
        cut=call.llm_info.get("finish_reason") == "length",
    )


def plain(value: Any) -> Any:
    """Returns a pydantic object as a dictionary, anything else as it is."""
    return value.model_dump() if hasattr(value, "model_dump") else value


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())
