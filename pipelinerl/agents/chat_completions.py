"""OpenAI's Chat Completions: ``POST /v1/chat/completions``."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

from pipelinerl.agents.dialect import ChatRequest, Event, Said, new_id, now, refuse_format, said_of
from pipelinerl.llm import LLMCall


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    function: _Function


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: dict[str, Any] | None = None
    prefix: bool | None = None
    partial: bool | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ChatBody(msgspec.Struct):
    """The fields of a request that are checked. Other fields are ignored here."""

    messages: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class ChatCompletions:
    """The dialect of ``/v1/chat/completions``.

    Args:
        model: name of the model in answers.
        token_text: returns the text of a token, for log-probabilities.
    """

    def __init__(self, model: str, token_text: Callable[[int], str]):
        self._model, self._token_text = model, token_text

    def read(self, body: Any) -> ChatRequest:
        request = msgspec.convert(body, _ChatBody)
        refuse_format("response_format", request.response_format)
        if request.top_logprobs:
            raise ValueError(f"top_logprobs is {request.top_logprobs}: log-probabilities are of sampled tokens only")
        last = request.messages[-1]
        if last.prefix or last.partial:
            raise ValueError("the last message is a prefix: the endpoint of a rollout continues no message")
        if any(one.function_call or one.role == "function" for one in request.messages):
            raise ValueError("a message has a function_call or its result: use tool_calls, and messages of role `tool`")
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in body["messages"]]
        return ChatRequest(
            messages=messages,
            tools=_tools(request) or None,
            parameters=body,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            logprobs=bool(request.logprobs),
        )

    def answer(self, call: LLMCall, asked: ChatRequest) -> dict[str, Any]:
        said = said_of(call)
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.tool_calls:
            message["tool_calls"] = said.tool_calls
        if said.thought:
            message["reasoning_content"] = said.thought
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish_reason(said, call),
            "logprobs": self._logprobs(call) if asked.logprobs else None,
        }
        return self._envelope("chat.completion") | {"choices": [choice], "usage": _usage(call)}

    def events(self, call: LLMCall, asked: ChatRequest) -> Iterator[Event]:
        """Yields role, thought, content, tool calls, end, and the usage if it was asked for."""
        said = said_of(call)
        envelope = self._envelope("chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if said.thought:
            deltas.append({"reasoning_content": said.thought})
        if said.content:
            deltas.append({"content": said.content})
        deltas += [{"tool_calls": [{"index": index} | one]} for index, one in enumerate(said.tool_calls)]
        for delta in deltas:
            yield "", envelope | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        end: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": finish_reason(said, call)}
        if asked.logprobs:
            end["logprobs"] = self._logprobs(call)
        yield "", envelope | {"choices": [end]}
        if asked.include_usage:
            yield "", envelope | {"choices": [], "usage": _usage(call)}

    def error(self, status: int, message: str) -> dict[str, Any]:
        return openai_error(status, message)

    def _logprobs(self, call: LLMCall) -> dict[str, Any]:
        """Returns the log-probability of every sampled token, thoughts and the end included."""
        texts = [self._token_text(one.token_id) for one in call.logprobs]
        tokens = [
            {"token": text, "logprob": one.logprob, "bytes": [*text.encode()], "top_logprobs": []}
            for one, text in zip(call.logprobs, texts, strict=True)
        ]
        return {"content": tokens, "refusal": None}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": new_id("chatcmpl-"), "object": kind, "created": now(), "model": self._model}


def _tools(request: _ChatBody) -> list[dict[str, Any]]:
    """Returns the tools as the template shows them: without `strict`, which asks the sampler for a constraint."""
    tools = request.tools if request.tool_choice != "none" else None
    return [
        tool | {"function": {name: value for name, value in tool["function"].items() if name != "strict"}}
        if isinstance(tool.get("function"), dict)
        else tool
        for tool in tools or ()
    ]


def openai_error(status: int, message: str) -> dict[str, Any]:
    """Returns an error as OpenAI's APIs write it."""
    kind = "authentication_error" if status == 401 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": None, "param": None}}


def finish_reason(said: Said, call: LLMCall) -> str:
    return "tool_calls" if said.tool_calls else str(call.llm_info.get("finish_reason") or "stop")


def _usage(call: LLMCall) -> dict[str, int]:
    prompt, output = call.prompt_length_tokens, call.output_length_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
