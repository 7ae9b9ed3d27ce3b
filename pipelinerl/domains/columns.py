"""Reads the question (text or messages) and the answer (text) of a row. A row with anything else is left out.

A column's name may be dotted (`reward_model.ground_truth`): the parts behind a dot are keys of objects, which may be
JSON text, or places in lists. Rows of verl, TRL, verifiers and OpenAI need no names at all (docs/guides/your-data.md).
"""

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from pipelinerl.domains.json_text import parse
from pipelinerl.domains.rows import UnusableRow, is_unusable
from pipelinerl.errors import DomainError

QUESTIONS = ("question", "problem", "prompt", "messages", "task")
"""Usual columns of a question. `task` is the last, because some data sets name the kind of task there."""
ANSWERS = ("answer", "solution", "completion", "reward_model.ground_truth")
IMAGES = re.compile(r"(?:decoded_)?(?:image|img|picture|figure|video|audio)s?(?:_\d+|_(?:url|path)s?)?", re.IGNORECASE)
"""Usual columns of images and sounds. A row with one of them filled is left out, because only text is sent."""
IMAGE_IN_TEXT = re.compile(
    r"<image>|\\includegraphics\b"
    r"|!\[[^\]]*\]\((?:(?:https?:|data:)[^)]{,40}|[^)\s]+\.(?:png|jpe?g|gif|svg|webp)\b)",
    re.IGNORECASE,
)
"""An image within a text, as LLaVA and verl mark it, or as LaTeX and Markdown do. HTML may be what is asked about."""
IMAGE_PART = re.compile("image|video|audio")
"""Types of the parts of a message that are not text."""
HAS_IMAGES = "it has images, videos or sounds, and only text is sent"
SURROGATE = re.compile("[\ud800-\udfff]")
INFINITE = (math.inf, -math.inf)
CHOICES = ("choices", "options")
"""Usual columns of the choices of a question."""
ROLES = ("system", "developer", "user", "assistant", "tool")
HOLDS = {"content", "tool_calls", "function_call"}
"""A message has at least one of these keys."""

Messages = list[dict[str, Any]]
MISSING = object()


def checked_columns(columns: Mapping[str, str] | None, fields: Sequence[str]) -> dict[str, str]:
    """Returns the columns that the configuration names.

    Args:
        columns: field → column.
        fields: the fields that the domain reads.
    Raises:
        DomainError: a field that the domain does not read, or a column's name that is not a text.
    """
    named = columns or {}
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named.values()):
        raise DomainError(f"`dataset_loader_params.columns` is {columns!r}: it must be an object, field: column")
    if others := sorted(named.keys() - set(fields)):
        raise DomainError(f"`dataset_loader_params.columns.{others[0]}` is not a field of this domain: {list(fields)}")
    return dict(named)


def column(row: dict[str, Any], name: str | None, usual: Sequence[str], what: str) -> tuple[str, Any]:
    """Returns the name and the value of the column of one field.

    Args:
        row: column → value.
        name: the column that the configuration names. None: the first of ``usual`` that exists.
        usual: common names of the column.
        what: the field in ``dataset_loader_params.columns``, for the message.
    Raises:
        UnusableRow: the row has no such column.
    """
    found = found_column(row, name, usual)
    if found is not None:
        return found
    wanted = repr(name) if name else f"any of {list(usual)}"
    raise UnusableRow(
        f"no column for `{what}`",
        f"has the columns {sorted(row)}, not {wanted}: set dataset_loader_params.columns.{what}",
    )


def found_column(row: dict[str, Any], name: str | None, usual: Sequence[str]) -> tuple[str, Any] | None:
    """Returns the name and the value of the first column that the row has."""
    for candidate in (name,) if name else usual:
        value = row.get(candidate, MISSING)
        value = inside(row, candidate) if value is MISSING else value
        if value is not MISSING:
            return candidate, value
    return None


def inside(value: Any, dotted: str) -> Any:
    """Returns the value behind a dotted name, or `MISSING`."""
    for part in dotted.split("."):
        if isinstance(value, str):
            try:
                value = parse(value)
            except ValueError:
                return MISSING
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def question_of(row: dict[str, Any], name: str | None, usual: Sequence[str] = QUESTIONS) -> str | Messages:
    """Returns a row's question: a text, or the messages up to the policy's turn. Arguments as for `column`.

    Raises:
        UnusableRow: there is no such column, it holds neither a text nor messages, or the question has images or lacks
            its choices.
    """
    refuse_images(row)
    key, value = column(row, name, usual, "task")
    if is_unusable(value) or value == []:
        raise UnusableRow("the question is missing", f"column `{key}` is {shown(value)}")
    if isinstance(value, str):
        value = messages_of_text(value) or value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else messages_in(value, key)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()  # the answer
    if not messages:
        raise UnusableRow("the question is missing", f"column `{key}` has no message before the answer")
    if image := next(filter(None, (IMAGE_IN_TEXT.search(message["content"]) for message in messages)), None):
        raise UnusableRow(HAS_IMAGES, f"column `{key}` holds {image[0]!r}")
    refuse_surrogates(key, *(message["content"] for message in messages))
    asked = words("\n".join(message["content"] for message in messages))
    for name in CHOICES:
        if is_filled(row.get(name)) and not all(words(choice) in asked for choice in leaves(row[name])):
            raise UnusableRow(
                "the question lacks its choices",
                f"column `{name}` is {shown(row[name])}: write them into the question, or remove the column",
            )
    return value if isinstance(value, str) else messages


def answer_of(row: dict[str, Any], name: str | None) -> str:
    """Returns a row's answer as text. In a conversation, the answer is the last message, which must be the assistant's.

    Raises:
        UnusableRow: there is no such column, or it holds neither a text nor a number.
    """
    found = found_column(row, name, ANSWERS)
    if found is None and not name:
        found = found_column(row, None, ("messages", "prompt"))
        found = found if found is not None and isinstance(found[1], list) else None
    key, value = found or column(row, name, ANSWERS, "answer")
    if isinstance(value, list) and value and isinstance(value[0], dict):
        last = messages_in(value, key)[-1]
        if last["role"] != "assistant":
            raise UnusableRow(
                "the answer is missing",
                f"the last message of column `{key}` has role {last['role']!r}, not 'assistant'; set "
                "dataset_loader_params.columns.answer",
            )
        value = last["content"]
    if is_unusable(value) or value == []:
        raise UnusableRow("the answer is missing", f"column `{key}` is {shown(value)}")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal) or value in INFINITE:
        fix = "write it as a text, as the question asks for it"
        if isinstance(value, dict | list):
            place = f"`{key}.value` for a key of an object or `{key}.0` for the first of a list"
            fix = f"set dataset_loader_params.columns.answer, as in {place}"
        raise UnusableRow("the answer is neither a text nor a number", f"column `{key}` is {shown(value)}: {fix}")
    refuse_surrogates(key, str(value))
    return str(value)


def messages_in(value: Any, key: str) -> Messages:
    """Returns messages with role and text. Keys without a value, which Parquet adds, are left out.

    Raises:
        UnusableRow: the value is not a list of messages, or a message holds more than text.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UnusableRow("neither a text nor a list of messages", f"column `{key}` is {shown(value)}")
    found = []
    for message in value:
        given = {name: part for name, part in message.items() if part is not None}
        role, content = given.get("role"), given.get("content")
        if role not in ROLES:
            raise UnusableRow(
                "a message of an unknown role",
                f"column `{key}` has one of role {role!r}: use one of {list(ROLES)}",
            )
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            kinds = [str(part.get("type")) for part in content]
            if image := next((kind for kind in kinds if IMAGE_PART.search(kind)), None):
                raise UnusableRow(HAS_IMAGES, f"column `{key}` has a part of type {image!r}")
            if set(kinds) <= {"text"}:
                content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str) or given.keys() - {"role", "content", "name"}:
            raise UnusableRow(
                "a message that is more than text",
                f"column `{key}` has one with {sorted(given)}, but only role, text and name are read",
            )
        found.append(given | {"content": content})
    return found


def messages_of_text(text: str) -> list[dict[str, Any]] | None:
    """Returns the messages that a text holds as JSON, as in a CSV. None: the text is not a list of messages."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = parse(text)
    except (ValueError, RecursionError):
        return None
    is_message = [isinstance(one, dict) and one.get("role") in ROLES and bool(one.keys() & HOLDS) for one in found]
    return found if found and all(is_message) else None


def refuse_images(row: Mapping[str, Any]) -> None:
    """Raises ``UnusableRow`` if a column of images or sounds holds something."""
    for key in row:
        if IMAGES.fullmatch(key) and is_filled(row[key]):
            raise UnusableRow(HAS_IMAGES, f"column `{key}` is {shown(row[key])}")


def refuse_surrogates(key: str, *texts: str) -> None:
    """Raises ``UnusableRow`` for a text with half a character of UTF-16: JSON can hold it, no request can send it."""
    if broken := next(filter(None, map(SURROGATE.search, texts)), None):
        raise UnusableRow("a text with half a character", f"column `{key}` holds {broken[0]!r}")


def is_filled(value: Any) -> bool:
    """Whether a cell, or a value inside its lists and objects, is neither missing, False nor 0."""
    if isinstance(value, dict):
        return any(map(is_filled, value.values()))
    return any(map(is_filled, value)) if isinstance(value, list) else bool(value) and not is_unusable(value)


def leaves(value: Any) -> list[Any]:
    """Returns the values inside lists and objects, at any depth."""
    parts = value.values() if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in leaves(part)] if isinstance(value, dict | list) else [value]


def words(value: Any) -> str:
    """A value as text, with one space between words."""
    return " ".join(str(value).split())


def shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
