"""Parses tool calls in sampled text: Hermes and PipelineRL's `rl_tool` here, any other format with vLLM's parser.

If the calls in a text cannot be parsed, the whole text becomes the content, so the domain sees what the model wrote.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipelinerl.errors import DomainError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
RL_TOOL = "rl_tool"
LISTED = re.compile(r"<tool_calls>\s*(.*?)\s*(?:</tool_calls>|\Z)", re.DOTALL | re.IGNORECASE)
FINAL = re.compile(r"\[BEGIN FINAL RESPONSE\](.*?)\[END FINAL RESPONSE\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReadText:
    """An answer's content and its tool calls as (name, arguments). Without calls, ``content`` is the whole text."""

    content: str
    calls: list[tuple[str, Any]]


CallReader = Callable[[str], ReadText]


def reader_of(name: str, tokenizer: Any, tools: list[dict]) -> CallReader:
    """Returns the reader of a format.

    Args:
        name: "" for Hermes, `rl_tool` for PipelineRL's, otherwise one that vLLM accepts for ``--tool-call-parser``.
        tokenizer: for vLLM's parser.
        tools: the prompt's tools in OpenAI format, for vLLM's parser.
    Raises:
        DomainError: vLLM is not installed, or has no parser of this name.
    """
    if name in ("", RL_TOOL):
        return read_rl_tool if name else read_hermes
    return vllm_reader(name, tokenizer, tools)


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


def read_rl_tool(text: str) -> ReadText:
    """Parses PipelineRL's format: the last ``<tool_calls>[…]``, else calls as bare JSON, one or a list, else Hermes.

    Of a text with a final response between its marks, that is the content.
    """
    marked = FINAL.search(text)
    final = marked[1].strip() if marked else None
    listed = LISTED.findall(text)
    if listed:
        return ReadText(final or "", calls_in(listed[-1]) or [])
    for candidate in (final, text.strip()):
        if candidate and (calls := calls_in(candidate)):
            return ReadText(final or "", calls)
    found = read_hermes(final if final and OPEN in final else text)
    if found.calls:
        return ReadText("" if marked else found.content, found.calls)
    return ReadText(text if final is None else final, [])


def calls_in(text: str) -> list[tuple[str, Any]]:
    """The calls of a JSON object or list. Empty if the text is no JSON, or an entry is no call."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return []
    entries = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(entry, dict) and "name" in entry and "arguments" in entry for entry in entries):
        return []
    return [(str(entry["name"]), entry["arguments"]) for entry in entries]


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
