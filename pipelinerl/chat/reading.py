"""Reads what a model said in its sampled text: a thought, tool calls, and the content.

Tool calls in Hermes' format and PipelineRL's `rl_tool` are read here, others, and thoughts, by vLLM's parsers. Calls
that cannot be parsed stay in the content, so the domain sees what the model wrote.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl.errors import DomainError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
RL_TOOL = "rl_tool"
LISTED = re.compile(r"<tool_calls>(.*?)(?:</tool_calls>|\Z)", re.DOTALL | re.IGNORECASE)
FINAL = ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")


@dataclass(frozen=True, slots=True)
class ReadText:
    """An answer's content and its tool calls as (name, arguments). Without either, ``content`` is the whole text."""

    content: str
    calls: list[tuple[str, Any]]
    thought: str = ""


Reader = Callable[[str], ReadText]


def reader_of(
    tool_parser: str, reasoning_parser: str, tokenizer: Any, tools: list[dict] | None, kwargs: dict[str, Any]
) -> Reader:
    """Returns the reader of a model's answers.

    Args:
        tool_parser: "" for Hermes, `rl_tool` for PipelineRL's, otherwise one of vLLM's ``--tool-call-parser``.
        reasoning_parser: "" leaves thoughts in the content, otherwise a name for ``--reasoning-parser``.
        tokenizer: for vLLM's parsers.
        tools: the prompt's tools in OpenAI format. Without them nothing is read as a call.
        kwargs: variables of the chat template, which say whether the model thinks.
    Raises:
        DomainError: vLLM is not installed, or has no parser of this name.
    """
    read_calls: Reader = read_plain
    if tools and tool_parser in ("", RL_TOOL):
        read_calls = read_rl_tool if tool_parser else read_hermes
    elif tools:
        read_calls = vllm_reader(tool_parser, tokenizer, tools)
    if not reasoning_parser:
        return read_calls
    split = thought_splitter(reasoning_parser, tokenizer, kwargs)

    def read(text: str) -> ReadText:
        thought, rest = split(text)
        return replace(read_calls(rest), thought=thought)

    return read


def read_plain(text: str) -> ReadText:
    """Returns the text as content. Used for prompts without tools."""
    return ReadText(text, [])


def read_hermes(text: str) -> ReadText:
    """Parses one or several ``<tool_call>{"name": …, "arguments": …}</tool_call>`` at the end of the text."""
    calls = []
    for piece in text.split(OPEN)[1:]:
        try:
            call = json.loads(piece.split(CLOSE)[0])
            calls.append((call["name"], call.get("arguments", {})))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return ReadText(text, [])
    return ReadText(text[: text.index(OPEN)].strip(), calls) if calls else ReadText(text, [])


def read_rl_tool(text: str) -> ReadText:
    """Parses PipelineRL's format: the last ``<tool_calls>[…]``, else calls as bare JSON, one or a list, else Hermes.

    Of a text with a final response between its marks, that is the content.
    """
    marked, is_closed, _ = text.partition(FINAL[0])[2].partition(FINAL[1])
    final = marked.strip() if is_closed else None
    listed = LISTED.findall(text)
    if listed:
        return ReadText(final or "", calls_in(listed[-1].strip()) or [])
    for candidate in (final, text.strip()):
        if candidate and (calls := calls_in(candidate)):
            return ReadText(final or "", calls)
    found = read_hermes(final if final and OPEN in final else text)
    if found.calls:
        return ReadText("" if is_closed else found.content, found.calls)
    return ReadText(text if final is None else final, [])


def calls_in(text: str) -> list[tuple[str, Any]]:
    """The calls of a JSON object or list. Empty if the text is no JSON, or an entry is no call."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(entry, dict) and "name" in entry and "arguments" in entry for entry in entries):
        return []
    return [(str(entry["name"]), entry["arguments"]) for entry in entries]


def vllm_reader(name: str, tokenizer: Any, tools: list[dict]) -> Reader:
    """Makes a reader from vLLM's parser of tool calls. The first import in a process takes seconds."""
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


def thought_splitter(name: str, tokenizer: Any, kwargs: dict[str, Any]) -> Callable[[str], tuple[str, str]]:
    """Makes a function from vLLM's parser that returns an answer's thought and the rest of its text."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager
    except ImportError as error:
        raise DomainError(f"`llm.reasoning_parser` is {name!r}: that needs vLLM on its machine ({error})") from error
    try:
        make = ReasoningParserManager.get_reasoning_parser(name)
    except KeyError as error:
        known = ", ".join(sorted(ReasoningParserManager.list_registered()))
        raise DomainError(f"`llm.reasoning_parser` is {name!r}: vLLM has {known}") from error
    request = ChatCompletionRequest(model="policy", messages=[])
    parser = make(tokenizer, chat_template_kwargs=kwargs)

    def split(text: str) -> tuple[str, str]:
        thought, rest = parser.extract_reasoning(text, request)
        return (thought or "").strip(), (rest or "").lstrip("\n")

    return split


def parsed_arguments(arguments: Any) -> Any:
    """Decodes the arguments from JSON. Returns them unchanged if they are not valid JSON."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
