"""Reads thought, tool calls and content in a model's sampled text.

A call has a name and a JSON object as arguments. If a parser finds anything else, which is the policy's mistake, the
whole text is content.
"""

import functools
import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipelinerl.errors import DomainError

log = logging.getLogger(__name__)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
RL_TOOL = "rl_tool"
LISTED = re.compile(r"<tool_calls>(.*?)(?:</tool_calls>|\Z)", re.DOTALL | re.IGNORECASE)
MAX_NESTING = 64
"""Maximum nesting of objects and lists in arguments. JSON readers of other languages refuse more."""
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
        tools: the prompt's tools in OpenAI format. Without them, no calls are read.
        kwargs: variables of the chat template. They may switch thinking on or off.
    Raises:
        DomainError: vLLM is not installed, or has no parser of this name.
    """
    read_calls: Reader = read_plain
    if tools and tool_parser in ("", RL_TOOL):
        read_calls = read_rl_tool if tool_parser else read_hermes
    elif tools:
        read_calls = vllm_reader(tool_parser, tokenizer, tools)
    read_calls = checked(read_calls, tool_parser)
    if not reasoning_parser:
        return read_calls
    split = thought_splitter(reasoning_parser, tokenizer, kwargs)

    def read(text: str) -> ReadText:
        try:
            thought, rest = split(text)
        except Exception as error:  # noqa: BLE001 — as in `checked`
            _warn_once(reasoning_parser, type(error).__name__)
            return read_calls(text)
        return replace(read_calls(rest), thought=thought)

    return read


def checked(read: Reader, name: str) -> Reader:
    """Returns a reader that leaves a text unchanged if ``read`` raises or returns an invalid call."""

    def read_checked(text: str) -> ReadText:
        try:
            found = read(text)
        except Exception as error:  # noqa: BLE001 — a policy may sample any text, and parsers of vLLM raise anything
            _warn_once(name, type(error).__name__)
            return ReadText(text, [])
        try:
            return replace(found, calls=[call_of(*call) for call in found.calls])
        except (ValueError, RecursionError):
            return ReadText(text, [])

    return read_checked


@functools.cache
def _warn_once(parser: str, error: str) -> None:
    log.warning("event=parser_raised parser=%s error=%s such answers stay text", parser, error)


def call_of(name: Any, arguments: Any) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments of a call. Arguments may be JSON in a string, or missing.

    Raises:
        ValueError: the name is not a text, or the arguments are not a JSON object that readers of all languages take.
    """
    while isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("a call is a name and an object of arguments")
    level: list[Any] = [arguments]
    for _ in range(MAX_NESTING):
        level = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)]
        if any(isinstance(one, int) and abs(one) > sys.float_info.max for one in level):
            raise ValueError("an integer is too large for other languages")
        level = [one for one in level if isinstance(one, (dict, list))]
    if level:
        raise ValueError(f"arguments are nested deeper than {MAX_NESTING}")
    json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    return name, arguments


def read_plain(text: str) -> ReadText:
    """Returns the text as content, for prompts without tools."""
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
    """Parses PipelineRL's format: the last ``<tool_calls>[…]``, else a bare JSON call or list of calls, else Hermes.

    The content is the final response between its marks, if the text has one.
    """
    marked, is_closed, _ = text.partition(FINAL[0])[2].partition(FINAL[1])
    final = marked.strip() if is_closed else None
    listed = LISTED.findall(text)
    if listed:
        calls = calls_in(listed[-1].strip())
        return ReadText(final or "", calls) if calls else ReadText(text if final is None else final, [])
    for candidate in (final, text.strip()):
        if candidate and (calls := calls_in(candidate)):
            return ReadText(final or "", calls)
    found = read_hermes(final if final and OPEN in final else text)
    if found.calls:
        return ReadText("" if is_closed else found.content, found.calls)
    return ReadText(text if final is None else final, [])


def calls_in(text: str) -> list[tuple[str, Any]]:
    """Returns the calls in a JSON object or list. Empty: the text is not JSON, or an entry is not a call."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(entry, dict) and "name" in entry and "arguments" in entry for entry in entries):
        return []
    return [(entry["name"], entry["arguments"]) for entry in entries]


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
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return ReadText((found.content or "").strip(), calls) if calls else ReadText(text, [])

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
