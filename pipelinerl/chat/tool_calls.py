"""Parses tool calls in sampled text: the Hermes format here, any other format with vLLM's parser of that name.

If the calls in a text cannot be parsed, the whole text becomes the content, so the domain sees what the model wrote.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipelinerl.errors import DomainError

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ReadText:
    """An answer's content and its tool calls as (name, arguments). Without calls, ``content`` is the whole text."""

    content: str
    calls: list[tuple[str, Any]]


CallReader = Callable[[str], ReadText]


def reader_of(name: str, tokenizer: Any, tools: list[dict]) -> CallReader:
    """Returns the reader of a format.

    Args:
        name: "" for Hermes, otherwise a name that vLLM accepts for ``--tool-call-parser``.
        tokenizer: for vLLM's parser.
        tools: the prompt's tools in OpenAI format, for vLLM's parser.
    Raises:
        DomainError: vLLM is not installed, or has no parser of this name.
    """
    return vllm_reader(name, tokenizer, tools) if name else read_hermes


def read_plain(text: str) -> ReadText:
    """Returns the text as content without looking for calls. Used for prompts without tools."""
    return ReadText(text, [])


def read_hermes(text: str) -> ReadText:
    """Parses one or several ``<tool_call>{"name": …, "arguments": …}</tool_call>`` at the end of the text."""
    calls = []
    for piece in text.split(OPEN)[1:]:
        try:
            call = json.loads(piece.split(CLOSE)[0])
            calls.append((call["name"], call.get("arguments", {})))
        except (ValueError, KeyError, TypeError, AttributeError):
            return ReadText(text, [])
    return ReadText(text[: text.index(OPEN)].strip(), calls) if calls else ReadText(text, [])


def vllm_reader(name: str, tokenizer: Any, tools: list[dict]) -> CallReader:
    """Makes a reader from vLLM's parser. The first import in a process takes seconds."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise DomainError(f"`llm.tool_parser` is {name!r}: that needs vLLM on its machine ({error})") from error
    try:
        make = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise DomainError(f"`llm.tool_parser` is {name!r}: vLLM has {known}") from error
    request = ChatCompletionRequest(model="policy", messages=[], tools=tools)
    parser = make(tokenizer, request.tools)

    def read(text: str) -> ReadText:
        found = parser.extract_tool_calls(text, request)
        calls = [(call.function.name, parsed_arguments(call.function.arguments)) for call in found.tool_calls]
        return ReadText((found.content or "").strip(), calls) if found.tools_called else ReadText(text, [])

    return read


def parsed_arguments(arguments: Any) -> Any:
    """Decodes the arguments from JSON. Returns them unchanged if they are not valid JSON."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
