"""OpenAI's Responses: ``POST /v1/responses``, with ``previous_response_id``, and ``/v1/responses/input_tokens``."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from pipelinerl.agents.chat_completions import openai_error
from pipelinerl.agents.dialect import ChatRequest, Event, Said, new_id, now, refuse_format, said_of
from pipelinerl.llm import LLMCall

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    image_url: str | None = None


class _Item(msgspec.Struct):
    """A message, a call, its result, or a thought. An item without a type is a message."""

    type: str = "message"
    role: str = ""
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[_Part] = ""


class _ResponsesTool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _TextConfig(msgspec.Struct):
    format: dict[str, Any] | None = None


class _ResponsesCount(msgspec.Struct):
    """The fields of a request whose tokens are counted."""

    input: str | list[_Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    tools: list[_ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None


class _ResponsesBody(_ResponsesCount, kw_only=True):
    """The fields of a request that are checked. Other fields are ignored here."""

    background: bool | None = None
    include: list[str] | None = None
    text: _TextConfig | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None


class Responses:
    """The dialect of ``/v1/responses``. It keeps the conversation of every answer, for ``previous_response_id``."""

    def __init__(self, model: str):
        self._model = model
        self._conversations: dict[str, list[dict[str, Any]]] = {}

    def read(self, body: Any) -> ChatRequest:
        request = msgspec.convert(body, _ResponsesBody)
        refuse_format("text.format", request.text and request.text.format)
        for name in ("background", "top_logprobs"):
            if getattr(request, name):
                raise ValueError(_unknown(name))
        if any("logprobs" in one for one in request.include or ()):
            raise ValueError(f"include is {request.include}: only Chat Completions has log-probabilities")
        asked = self._conversation(request)
        names = {"max_tokens": request.max_output_tokens, "temperature": request.temperature, "top_p": request.top_p}
        return replace(asked, parameters=names, stream=bool(request.stream))

    def read_count(self, body: Any) -> ChatRequest:
        """Returns the request whose tokens are counted."""
        return self._conversation(msgspec.convert(body, _ResponsesCount))

    def count(self, num_tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    def _conversation(self, request: _ResponsesCount) -> ChatRequest:
        if request.conversation:
            raise ValueError(_unknown("conversation"))
        before = []
        if request.previous_response_id:
            if request.previous_response_id not in self._conversations:
                raise ValueError(
                    f"previous_response_id {request.previous_response_id!r} is not an answer of this rollout"
                )
            before = self._conversations[request.previous_response_id]
        items = [_Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
        instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
        return ChatRequest(
            messages=instructions + before + _chat_messages(items),
            num_instructions=len(instructions),
            tools=None if request.tool_choice == "none" else _chat_tools(request.tools or []),
        )

    def answer(self, call: LLMCall, asked: ChatRequest) -> dict[str, Any]:
        said = said_of(call)
        response = self._new_response(call)
        message = {"role": "assistant", "content": said.content, "tool_calls": said.tool_calls}
        self._conversations[response["id"]] = [*asked.messages[asked.num_instructions :], message]
        prompt, output = call.prompt_length_tokens, call.output_length_tokens
        usage: dict[str, Any] = {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        end: dict[str, Any] = {"status": "completed", "incomplete_details": None}
        if said.cut:
            end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return response | end | {"output": _items(said), "usage": usage}

    def events(self, call: LLMCall, asked: ChatRequest) -> Iterator[Event]:
        whole = self.answer(call, asked)
        empty = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[Event] = [("response.created", {"response": empty}), ("response.in_progress", {"response": empty})]
        for index, item in enumerate(whole["output"]):
            events += _item_events(index, item)
        events.append((f"response.{whole['status']}", {"response": whole}))
        for number, (kind, data) in enumerate(events):
            yield kind, {"type": kind, "sequence_number": number, **data}

    def error(self, status: int, message: str) -> dict[str, Any]:
        return openai_error(status, message)

    def _new_response(self, call: LLMCall) -> dict[str, Any]:
        return {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": now(),
            "model": self._model,
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": call.llm_info["parameters"].get("temperature"),
            "top_p": None,
            "tool_choice": "auto",
            "tools": [],
        }


def _unknown(name: str) -> str:
    return f"{name} is set: leave it out, the endpoint of a rollout has none"


def _items(said: Said) -> list[dict[str, Any]]:
    """Returns thought, text and calls as output items."""
    items: list[dict[str, Any]] = []
    if said.thought:
        content = [{"type": "reasoning_text", "text": said.thought}]
        items.append({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": content})
    if said.content or not said.tool_calls:
        part = {"type": "output_text", "text": said.content or "", "annotations": [], "logprobs": []}
        status = "incomplete" if said.cut else "completed"
        message = {"type": "message", "id": new_id("msg_"), "role": "assistant", "status": status}
        items.append(message | {"content": [part]})
    for call in said.tool_calls:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        made = {"type": "function_call", "id": new_id("fc_"), "call_id": call["id"], "status": "completed"}
        items.append(made | function)
    return items


def _item_events(index: int, item: dict[str, Any]) -> Iterator[Event]:
    """Yields the events that build an output item."""
    place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        empty = item | {"arguments": "", "status": "in_progress"}
    else:
        empty = item | {"content": []} | ({"status": "in_progress"} if item["type"] == "message" else {})
    yield "response.output_item.added", {"output_index": index, "item": empty}
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", place | {"delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", place | done
    else:
        (part,) = item["content"]
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        place["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        yield "response.content_part.added", place | {"part": part | {"text": ""}}
        yield f"response.{kind}.delta", place | {"delta": part["text"]} | more
        yield f"response.{kind}.done", place | {"text": part["text"]} | more
        yield "response.content_part.done", place | {"part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _chat_tools(tools: list[_ResponsesTool]) -> list[dict[str, Any]] | None:
    for tool in tools:
        if tool.type != "function":
            raise ValueError(f"a tool has the type {tool.type!r}: only function tools are supported")
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ] or None


def _chat_messages(items: list[_Item]) -> list[dict[str, Any]]:
    """Returns the messages of a conversation. The items of one answer become one message, without its thought."""
    messages: list[dict[str, Any]] = []
    is_open = False
    for item in items:
        is_answer = item.type in ("reasoning", "function_call") or item.role == "assistant"
        if is_answer and not is_open:
            messages.append({"role": "assistant", "content": ""})
        is_open = is_answer
        if item.type == "message":
            content = _content(item.content or "")
            if not is_answer:
                messages.append({"role": "system" if item.role == "developer" else item.role, "content": content})
            elif isinstance(content, str):
                messages[-1]["content"] += content
            else:
                raise ValueError("an answer in input has a part of type 'input_image': models here answer in text")
        elif item.type == "function_call":
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            messages += _result(item)
        elif item.type != "reasoning":
            raise ValueError(
                f"input has an item of type {item.type!r}; supported are messages, calls and their results"
            )
    if not messages:
        raise ValueError("input is empty: give the conversation's items")
    return messages


def _result(item: _Item) -> Iterator[dict[str, Any]]:
    """Yields a tool's result as text, then its images as a user message, because templates show no images of tools."""
    parts = [_Part(type="text", text=item.output)] if isinstance(item.output, str) else item.output
    texts = [part for part in parts if part.type != "input_image"]
    yield {"role": "tool", "tool_call_id": item.call_id, "content": _content(texts)}
    if len(texts) < len(parts):
        yield {"role": "user", "content": _content([part for part in parts if part.type == "input_image"])}


def _content(content: str | list[_Part]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in TEXT_PARTS and not (part.type == "input_image" and part.image_url):
            raise ValueError(f"input has a part of type {part.type!r}; supported are text, and images as data URLs")
    if all(part.type in TEXT_PARTS for part in content):
        return "\n".join(part.text for part in content)
    return [
        {"type": "text", "text": part.text}
        if part.type in TEXT_PARTS
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in content
    ]
