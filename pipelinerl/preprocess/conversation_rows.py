"""Rows of a data set as conversations to imitate, with the weights that the data gives to them.

A row that does not say what to imitate raises `UnusableRow`: it is left out, counted and named. Nothing here renders.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pipelinerl.config.origin import data_file
from pipelinerl.domains.columns import ROLES, messages_of_text, refuse_images, refuse_surrogates
from pipelinerl.domains.datasets import rows_of
from pipelinerl.domains.rows import RowReport, UnusableRow, is_unusable, usable_problems

SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-3, 1e3
"""So that products, sums and shares of weights stay finite in float32."""
MESSAGE_WEIGHTS = ("weight", "trainable", "train", "training", "loss_mask", "loss")
"""Keys of a message that say whether, or how much, it is trained."""
ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight", "trainable", "train", "loss_mask")
"""Columns with the same meaning for a whole conversation."""
LIKE_A_WEIGHT = re.compile(
    r"(^|_)(train|trainable|trained|training|learn|learnable|supervised?|loss|losses|mask|masked|masks|weights?|ignored?)(_|$)"
)
"""Words in unknown keys and columns that may mean the same: such rows are refused."""
COLUMNS = ("messages", "conversations", "tools", "functions", "prompt", "completion", "system")
WORDS = {"true": 1.0, "false": 0.0}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an answer's thoughts. Templates read one of them."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What is imitated: messages and tools in OpenAI format."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    weight: float = 1.0
    """Weight of its tokens beside those of other conversations."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Index of a message → weight of its tokens. An answer that is not named has 1."""
    source: tuple[str, int] = field(default=("", 0), compare=False)
    """Data set and row."""

    @property
    def answer_weights(self) -> dict[int, float]:
        """Index → weight of every message of the assistant."""
        return {index: self.weight * self.weights.get(index, 1.0) for index in self._answers}

    @property
    def trains_prompt(self) -> bool:
        """Whether `sft.prompt_weight` applies: no message of another role has the weight 0."""
        return self.weights.keys() <= self._answers

    @property
    def _answers(self) -> set[int]:
        return {index for index, message in enumerate(self.messages) if message["role"] == "assistant"}


@dataclass(kw_only=True)
class DatasetReport(RowReport):
    """The rows of one data set that were read, and what in them was not."""

    columns_not_read: set[str] = field(default_factory=set)
    """Those that sound like a weight."""

    def notes(self) -> list[str]:
        """Lines for the user."""
        rows = [f"dataset {self.dataset!r}, left out {line}" for line in self.lines()]
        columns = [
            f"dataset {self.dataset!r}, column {name!r} is not read: weights of rows are in {', '.join(ROW_WEIGHTS)}"
            for name in sorted(self.columns_not_read)
        ]
        return rows + columns


def load_conversations(names: Iterable[str], max_left_out: float) -> tuple[list[Conversation], list[DatasetReport]]:
    """Read data sets as the conversations to imitate, with the report of each data set.

    ``max_left_out``: largest share of a data set's rows that may be left out, from 0 to 1.

    Raises:
        DomainError: a data set has no row to imitate, or too many were left out.
    """
    found: list[Conversation] = []
    reports = []
    for name in names:
        report, own = _read_dataset(name, max_left_out)
        found += own
        reports.append(report)
    return found, reports


def _read_dataset(name: str, max_left_out: float) -> tuple[DatasetReport, list[Conversation]]:
    report, local = DatasetReport(dataset=name), data_file(name)
    has_absent_nulls = local is None or local[0].endswith(".parquet")

    def read(row: Mapping[str, Any], index: int) -> Conversation:
        report.columns_not_read.update(name for name in row if name not in ROW_WEIGHTS and sounds_like_a_weight(name))
        return read_conversation(row, (name, index), has_absent_nulls=has_absent_nulls)

    found = list(usable_problems(rows_of(name, False), read, report))
    if not found or report.share_left_out > max_left_out:
        raise report.refusal(f"Mend them, or allow it with `sft.max_left_out` (now {max_left_out})")
    wanted = []
    for conversation in found:  # those without weight are left out as the data wants it, so no limit counts them
        if any(conversation.answer_weights.values()):
            wanted.append(conversation)
        else:
            report.leave_out(conversation.source[1], UnusableRow("every answer has the weight 0"))
    report.kept = len(wanted)
    if not wanted:
        raise report.refusal("Name conversations with an answer to train")
    return report, wanted


def read_conversation(
    row: Mapping[str, Any], source: tuple[str, int] = ("", 0), *, has_absent_nulls: bool = False
) -> Conversation:
    """Read a row: `messages`, `conversations`, or `prompt` and `completion`, perhaps with `tools` and `system`.

    Args:
        source: data set and row.
        has_absent_nulls: whether null stands for an absent key everywhere, as in parquet, whose objects all have the
            same keys. Otherwise the nulls in arguments and schemas of tools are values.
    Raises:
        UnusableRow: it is missing or unclear what to imitate.
    """
    refuse_images(row)
    given = {name: row[name] for name in COLUMNS if not is_unusable(row.get(name))}
    weight = _weight_of(row, ROW_WEIGHTS, "the row")
    messages, weights = _read_messages(_raw_messages(row, given), has_absent_nulls, is_trained=weight != 0)
    tools = _read_tools(given, has_absent_nulls)
    refuse_surrogates("messages", json.dumps([messages, tools], ensure_ascii=False, default=str))
    return Conversation(
        messages=messages,
        tools=tools,
        weight=1.0 if weight is None else weight,
        weights=weights,
        source=source,
    )


def _raw_messages(row: Mapping[str, Any], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" in given or "conversations" in given:
        messages = _decoded(given.get("messages", given.get("conversations")))
    elif {"prompt", "completion"} <= given.keys():
        messages = [*_said(given["prompt"], "user"), *_said(given["completion"], "assistant")]
    else:
        raise UnusableRow(
            "it has no value in `messages`, `conversations`, or `prompt` and `completion`",
            f"columns {', '.join(sorted(row))}",
        )
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise UnusableRow("its messages are no list of objects", _short(messages))
    messages = [_from_sharegpt(one) if one.get("role") is None and one.get("from") else one for one in messages]
    return _with_system(messages, given.get("system"))


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """The messages behind the text of the column ``system``, which ShareGPT's sets have beside them."""
    if system is None:
        return messages
    own = [message.get("content") for message in messages if message.get("role") in ("system", "developer")]
    if not isinstance(system, str) or own not in ([], [system]):
        raise UnusableRow("its column `system` is no text, or differs from its system message", _short(system))
    return messages if own else [{"role": "system", "content": system}, *messages]


def _said(value: Any, role: str) -> list[Any]:
    """The messages of a column that holds a text or messages. A text that looks like another list stays a text."""
    if isinstance(value, str):
        return messages_of_text(value) or [{"role": role, "content": value}]
    return value if isinstance(value, list) else [value]


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    role = SHAREGPT_ROLES.get(str(message["from"]))
    if role is None:
        raise UnusableRow("a message is from somebody unknown", f"{message['from']!r}, not {sorted(SHAREGPT_ROLES)}")
    others = {name: value for name, value in message.items() if name not in ("from", "value", "role")}
    return {"role": role, "content": message.get("value"), **others}


def _read_messages(
    raw: Iterable[dict[str, Any]], has_absent_nulls: bool, *, is_trained: bool
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """The messages in OpenAI's present form without what only the trainer reads, and the weights that they name."""
    messages: list[dict[str, Any]] = []
    weights: dict[int, float] = {}
    for index, one in enumerate(raw):
        where = f"message {index}"
        weight = _weight_of(one, MESSAGE_WEIGHTS, where)
        message = {name: value for name, value in _given(one).items() if name not in MESSAGE_WEIGHTS}
        if unknown := [name for name in message if sounds_like_a_weight(name)]:
            raise UnusableRow(
                "a message has a key that sounds like a weight and is not known", f"{where}: {', '.join(unknown)}"
            )
        role = message.get("role")
        if role not in (*ROLES, "function"):
            raise UnusableRow("a message has no role that is known", f"{where}: {_short(role)}, not in {ROLES}")
        if role == "function":
            message["role"] = "tool"
            if messages and messages[-1].get("tool_calls"):
                message.setdefault("tool_call_id", messages[-1]["tool_calls"][0].get("id", ""))
        if weight and role != "assistant":
            raise UnusableRow("a message is to be trained that the assistant does not say", f"{where}, role {role}")
        if weight is not None:
            weights[index] = weight
        if calls := _read_calls(message, index, has_absent_nulls):
            message["tool_calls"] = calls
        if thought := next((message[name] for name in THOUGHTS if not is_unusable(message.get(name))), None):
            message |= dict.fromkeys(THOUGHTS, thought)  # a template reads it by one of these names
        if isinstance(message.get("content"), list):
            message["content"] = [_given(part) if isinstance(part, dict) else part for part in message["content"]]
            kinds = {str(part.get("type") or "text") for part in message["content"] if isinstance(part, dict)}
            if kinds - {"text"}:
                raise UnusableRow("a message has parts that are no text", f"{where}: {', '.join(sorted(kinds))}")
        _check_content(message, where, is_trained=is_trained and role == "assistant" and weight != 0)
        messages.append(message)
    if not any(message["role"] == "assistant" for message in messages):
        raise UnusableRow("no message has the role assistant", f"roles {[message['role'] for message in messages]}")
    return messages, weights


def _read_calls(message: dict[str, Any], index: int, has_absent_nulls: bool) -> list[dict[str, Any]]:
    """The tool calls of a message, whose keys `tool_calls` and `function_call` are taken out of it."""
    calls, old = _decoded(message.pop("tool_calls", None)) or [], _decoded(message.pop("function_call", None))
    if old and calls:
        raise UnusableRow("an answer has both `tool_calls` and `function_call`", f"message {index}")
    calls = [{"id": f"call{index:05d}", "type": "function", "function": old}] if old else calls
    if not isinstance(calls, list):
        raise UnusableRow("`tool_calls` is no list", f"message {index}: {_short(calls)}")
    return [_read_call(call, index, has_absent_nulls) for call in calls]


def _read_call(call: Any, index: int, has_absent_nulls: bool) -> dict[str, Any]:
    rest = _given(call) if isinstance(call, dict) else {}
    function = rest.pop("function", None) or {name: rest.pop(name) for name in ("name", "arguments") if name in rest}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise UnusableRow("a tool call has no name", f"message {index}: {_short(call)}")
    arguments = function.get("arguments")
    arguments = {} if is_unusable(arguments) else arguments
    if has_absent_nulls:
        arguments = _without_nulls(arguments)
    return {"type": "function", **rest, "function": {**_given(function), "arguments": arguments}}


def _check_content(message: Mapping[str, Any], where: str, *, is_trained: bool) -> None:
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise UnusableRow("the content of a message is neither text nor a list of parts", f"{where}: {_short(content)}")
    if is_trained and not message.get("tool_calls") and _is_blank(content):
        raise UnusableRow("an answer to train is empty or missing", where)  # else the model learns to say nothing
    if content is None and message["role"] not in ("assistant", "tool"):
        raise UnusableRow("a message has no content", f"{where}, role {message['role']}")


def _is_blank(content: Any) -> bool:
    if not isinstance(content, list):
        return is_unusable(content)
    parts = [part if isinstance(part, dict) else {"text": part} for part in content]
    return all(part.get("type", "text") == "text" and is_unusable(part.get("text")) for part in parts)


def _read_tools(given: Mapping[str, Any], has_absent_nulls: bool) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's present form. `functions` has them without their type."""
    tools = _decoded(given.get("tools", given.get("functions")))
    if not tools:
        return None
    tools = [_decoded(one) for one in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise UnusableRow("its tools are no list of objects", _short(tools))
    found = [one if "function" in one or "name" not in one else {"type": "function", "function": one} for one in tools]
    return [_without_nulls(one) for one in found] if has_absent_nulls else found


@lru_cache(1024)
def sounds_like_a_weight(name: str) -> bool:
    """Whether a key may say what is trained: `lossMask`, `train-on-turn`, `is_masked`."""
    return LIKE_A_WEIGHT.search(re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", str(name)).lower()) is not None


def _weight_of(holder: Mapping[str, Any], names: Iterable[str], where: str) -> float | None:
    """The product of the weights that a row or a message gives. None: it gives none."""
    product = None
    for name in names:
        value = holder.get(name)
        if is_unusable(value):
            continue
        try:
            number = WORDS[text] if (text := str(value).strip().lower()) in WORDS else float(text)
        except ValueError:
            number = math.nan
        if number != 0 and not SMALLEST_WEIGHT <= number <= LARGEST_WEIGHT:
            raise UnusableRow(
                f"a weight is neither 0, nor {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}, nor true or false",
                f"{where}, {name} {_short(value)}",
            )
        product = number if product is None else product * number
    return product


def _decoded(value: Any) -> Any:
    """Lists, objects and null that are written as JSON are read, other text stays."""
    if isinstance(value, str) and (value.lstrip().startswith(("[", "{")) or value.strip() == "null"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value. Parquet gives the same fields to all messages."""
    return {name: value for name, value in fields.items() if value is not None and value == value}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
