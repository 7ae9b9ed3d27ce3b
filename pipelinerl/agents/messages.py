"""Anthropic's Messages: ``POST /v1/messages``, and ``/v1/messages/count_tokens``."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from pipelinerl.agents.dialect import ChatRequest, Event, Said, new_id, refuse_format, said_of
from pipelinerl.llm import LLMCall

CLIENT_LINE = "x-anthropic-billing-header"
"""Prefix of a system block of Claude Code that differs in every request."""


class _Source(msgspec.Struct):
    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    source: _Source | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[_Block] | None" = None
    thinking: str = ""


class _AnthropicMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _AnthropicTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None


class _Thinking(msgspec.Struct):
    type: str


class _ToolChoice(msgspec.Struct):
    type: str


class _OutputConfig(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Count(msgspec.Struct):
    """The fields of a request whose tokens are counted."""

    messages: Annotated[list[_AnthropicMessage], msgspec.Meta(min_length=1)]
    system: str | list[_Block] | None = None
    tools: list[_AnthropicTool] | None = None
    tool_choice: _ToolChoice | None = None


class _MessagesBody(_Count, kw_only=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None


class Messages:
    """The dialect of ``/v1/messages``."""

    def __init__(self, model: str):
        self._model = model

    def read(self, body: Any) -> ChatRequest:
        request = msgspec.convert(body, _MessagesBody)
        refuse_format("output_config.format", request.output_config and request.output_config.format)
        if request.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's: the endpoint of a rollout continues no message")
        names: dict[str, Any] = {"max_tokens": request.max_tokens, "stop": request.stop_sequences}
        names |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        return ChatRequest(
            messages=_chat_messages(request),
            tools=_chat_tools(request),
            parameters=names,
            stream=bool(request.stream),
            thoughts=request.thinking is not None and request.thinking.type != "disabled",
        )

    def read_count(self, body: Any) -> ChatRequest:
        """Returns the request whose tokens are counted."""
        request = msgspec.convert(body, _Count)
        return ChatRequest(messages=_chat_messages(request), tools=_chat_tools(request))

    def count(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}

    def answer(self, call: LLMCall, asked: ChatRequest) -> dict[str, Any]:
        said = said_of(call)
        end = {"stop_reason": _stop_reason(said), "stop_sequence": said.stop}
        return self._message(call) | end | {"content": _blocks(said, asked)}

    def events(self, call: LLMCall, asked: ChatRequest) -> Iterator[Event]:
        said = said_of(call)
        message = self._message(call)
        empty = message | {"content": [], "usage": message["usage"] | {"output_tokens": 0}}
        yield _event("message_start", message=empty | {"stop_reason": None, "stop_sequence": None})
        for index, block in enumerate(_blocks(said, asked)):
            empty_block, deltas = _in_pieces(block)
            yield _event("content_block_start", index=index, content_block=empty_block)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {"stop_reason": _stop_reason(said), "stop_sequence": said.stop}
        yield _event("message_delta", delta=end, usage=message["usage"])
        yield _event("message_stop")

    def error(self, status: int, message: str) -> dict[str, Any]:
        kinds = {
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
        }
        kind = kinds.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def _message(self, call: LLMCall) -> dict[str, Any]:
        usage = {"input_tokens": call.prompt_length_tokens, "output_tokens": call.output_length_tokens}
        return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": self._model, "usage": usage}


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def _blocks(said: Said, asked: ChatRequest) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if said.thought and asked.thoughts:
        blocks.append({"type": "thinking", "thinking": said.thought, "signature": ""})
    if said.content:
        blocks.append({"type": "text", "text": said.content, "citations": None})
    for call in said.tool_calls:
        function = call["function"]
        given = {"name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", "id": call["id"]} | given)
    return blocks


def _in_pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the empty block that a stream starts with, and the deltas that fill it."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        return block | {"thinking": ""}, [delta, {"type": "signature_delta", "signature": ""}]
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _stop_reason(said: Said) -> str:
    if said.tool_calls:
        return "tool_use"
    return "stop_sequence" if said.stop else "max_tokens" if said.cut else "end_turn"


def _chat_tools(request: _Count) -> list[dict[str, Any]] | None:
    if not request.tools or (request.tool_choice and request.tool_choice.type == "none"):
        return None
    for tool in request.tools:
        if tool.input_schema is None:
            raise ValueError(f"tool {tool.name!r} has no input_schema: only function tools are supported")
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in request.tools
    ]


def _chat_messages(request: _Count) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = [{"type": "text", "text": request.system}] if isinstance(request.system, str) else None
    blocks = msgspec.convert(system, list[_Block]) if system else request.system or []
    kept = [_text(block) for block in blocks if not isinstance(block, str)]
    kept = [text for text in kept if text and not text.startswith(CLIENT_LINE)]
    if kept:
        messages.append({"role": "system", "content": "\n".join(kept)})
    for message in request.messages:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content))
        else:
            messages += _given(message.role, message.content)
    return messages


def _assistant(blocks: list[_Block]) -> dict[str, Any]:
    """Returns the assistant's message, without thoughts: the sampled tokens hold the policy's own."""
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(b.text for b in blocks if b.type == "text")}
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": json.dumps(b.input)}}
        for b in blocks
        if b.type == "tool_use"
    ]
    for block in blocks:
        if block.type not in ("text", "tool_use", "thinking", "redacted_thinking"):
            raise ValueError(f"a message of the assistant has a block of type {block.type!r}")
    return message | ({"tool_calls": calls} if calls else {})


def _given(role: str, blocks: list[_Block]) -> Iterator[dict[str, Any]]:
    """Yields the results of tools, then the rest as one message."""
    rest = []
    for block in blocks:
        if block.type != "tool_result":
            rest.append(_part(block))
            continue
        inner = [block.content] if isinstance(block.content, str) else block.content or []
        parts = [{"type": "text", "text": one} if isinstance(one, str) else _part(one) for one in inner]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        rest += [part for part in parts if part["type"] != "text"]
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": "\n".join(texts)}
    if rest:
        yield {"role": role, "content": rest}


def _part(block: _Block) -> dict[str, Any]:
    if block.type == "image" and block.source is not None:
        source = block.source
        url = f"data:{source.media_type};base64,{source.data}" if source.type == "base64" else source.url
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": _text(block)}


def _text(block: _Block) -> str:
    if block.type != "text":
        raise ValueError(
            f"a message has a block of type {block.type!r}; supported are text, images, tools and thoughts"
        )
    return block.text
