"""What a row's columns hold: a question as text or messages, an answer as text. Everything else is refused by name.

A column's name may be dotted (`reward_model.ground_truth`): the parts behind a dot are keys of objects, which may be
JSON text, or places in lists. Rows of verl, TRL, verifiers and OpenAI need no names at all (docs/guides/your-data.md).
"""

import json
from collections.abc import Sequence
from typing import Any

from pipelinerl.errors import DomainError

QUESTIONS = ("question", "problem", "prompt", "messages", "task")
"""Usual columns of a question. `task` is the last, because some data sets name the kind of task there."""
ANSWERS = ("answer", "solution", "completion", "reward_model.ground_truth")
ROLES = ("system", "developer", "user", "assistant", "tool")

Messages = list[dict[str, Any]]
MISSING = object()


def column(row: dict[str, Any], name: str | None, usual: Sequence[str], dataset: str, what: str) -> Any:
    """Returns a row's value of one field.

    Args:
        row: column → value.
        name: the column that the configuration names. None: the first of ``usual`` that exists.
        usual: common names of the column.
        dataset: name of the data set, for the message.
        what: name of the field in ``dataset_loader_params.columns``, for the message.
    Raises:
        DomainError: the row has no such column.
    """
    found = found_column(row, name, usual)
    if found is not None:
        return found[1]
    wanted = repr(name) if name else f"any of {list(usual)}"
    raise DomainError(
        f"dataset {dataset!r} has the columns {sorted(row)}, not {wanted}: set dataset_loader_params.columns.{what}"
    )


def found_column(row: dict[str, Any], name: str | None, usual: Sequence[str]) -> tuple[str, Any] | None:
    """The name and the value of the first column that the row has."""
    for candidate in (name,) if name else usual:
        value = row.get(candidate, MISSING)
        value = inside(row, candidate) if value is MISSING else value
        if value is not MISSING:
            return candidate, value
    return None


def inside(value: Any, dotted: str) -> Any:
    """The value behind a dotted name, or `MISSING`."""
    for part in dotted.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return MISSING
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def question_of(row: dict[str, Any], name: str | None, dataset: str, index: int) -> str | Messages:
    """Returns a row's question: a text, or the messages up to the policy's turn.

    Raises:
        DomainError: there is no such column, or it holds neither a text nor messages.
    """
    value = column(row, name, QUESTIONS, dataset, "task")
    key = (found_column(row, name, QUESTIONS) or ("",))[0]
    if isinstance(value, str):
        return value
    messages = messages_in(value, dataset, index, key)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()  # the answer
    if not messages:
        raise DomainError(f"dataset {dataset!r}: column `{key}` of row {index} has no message before the answer")
    return messages


def answer_of(row: dict[str, Any], name: str | None, dataset: str, index: int) -> str:
    """Returns a row's answer as text. Of a conversation it is the last message, which must be the assistant's.

    Raises:
        DomainError: there is no such column, or its value is no answer.
    """
    found = found_column(row, name, ANSWERS)
    if found is None and not name:
        found = found_column(row, None, ("messages", "prompt"))
        found = found if found is not None and isinstance(found[1], list) else None
    if found is None:
        column(row, name, ANSWERS, dataset, "answer")
        raise AssertionError("the column is missing")
    key, value = found
    if isinstance(value, list):
        last = (messages_in(value, dataset, index, key) or [{"role": "nobody"}])[-1]
        if last["role"] != "assistant":
            raise DomainError(
                f"dataset {dataset!r}: row {index} has no answer: the last message of column `{key}` is of "
                f"{last['role']!r}, not of 'assistant'; set dataset_loader_params.columns.answer"
            )
        value = last["content"]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DomainError(
            f"dataset {dataset!r}: column `{key}` of row {index} is {shown(value)}, not an answer: "
            f"set dataset_loader_params.columns.answer, as in `{key}.value` for a key of an object"
        )
    if not str(value).strip():
        raise DomainError(f"dataset {dataset!r}: row {index} has no answer: column `{key}` is empty")
    return str(value)


def messages_in(value: Any, dataset: str, index: int, key: str) -> Messages:
    """Returns messages with role and text. Keys without a value, which Parquet adds, are left out.

    Raises:
        DomainError: the value is no list of messages, or one holds something else than text.
    """
    where = f"dataset {dataset!r}: column `{key}` of row {index}"
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise DomainError(f"{where} is {shown(value)}, not a text or a list of messages")
    found = []
    for message in value:
        given = {name: part for name, part in message.items() if part is not None}
        role, content = given.get("role"), given.get("content")
        if role not in ROLES:
            raise DomainError(f"{where} has a message of role {role!r}, not one of {list(ROLES)}")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str) or given.keys() - {"role", "content", "name"}:
            raise DomainError(f"{where} has a message with {sorted(given)}, of which only role, text and name are read")
        found.append(given | {"content": content})
    return found


def shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
