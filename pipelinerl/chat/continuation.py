"""Continues the tokens of an earlier call, for any chat template.

A prompt continues a call if it repeats the call's messages and its answer. Its tokens are then ``prompt ids of the call
+ sampled ids + ids of the template's text between this answer and the next one``. The history is never rendered again,
so a template that drops thoughts changes no token. A prompt that continues no call starts another sequence.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from jinja2 import TemplateError

from pipelinerl.chat.families import FamilyRenderer
from pipelinerl.chat.images import images_of, is_image
from pipelinerl.chat.reading import ReadText
from pipelinerl.chat.rendering import NO_SPANS, ChatRenderer, Rendered, plain_message
from pipelinerl.errors import DomainError

KNOWN_ANSWER = "PIPELINERL KNOWN ANSWER"
QUESTION = {"role": "user", "content": "x"}

History = tuple[bytes, ...]
"""A digest of every message of a conversation. Clients may write equal messages in different ways."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """An earlier call of the rollout, which a later prompt may continue."""

    history: History
    """Digests of the prompt's messages."""
    answers: frozenset[bytes]
    """Digests of the messages that may stand for its answer."""
    tools: list[dict] | None
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    end_text: str
    """Text of the token that ended the completion. Empty if it was cut."""
    prefix_version: int | None = None
    """Weight version of the first token sampled in this conversation. None if the server reports none."""
    image_spans: np.ndarray = field(default_factory=NO_SPANS.copy)
    """int32 [I, 2]: (start, end exclusive) of the tokens of each image in the prompt."""
    hinted_ids: np.ndarray | None = None
    """int32 [H]: the prompt as a teacher reads it that sees the problem's hint. None: no teacher does."""


def history_of(messages: Sequence[dict]) -> History:
    """Returns a digest of every message: role, text, images and tool calls.

    Thoughts, white space around an answer, ids of tool calls, and the order and white space of arguments are ignored.
    """
    return tuple(_digest(message) for message in messages)


def answers_of(sampled_text: str, end_text: str, said: ReadText, stop: Sequence[str]) -> frozenset[bytes]:
    """Returns the digests of the messages that may stand for an answer: as it was sampled, and as it was read.

    Args:
        sampled_text: the decoded completion, without the token that ended it.
        stop: stop strings of the call. OpenAI's API removes the one that ended an answer.
    """
    texts = {sampled_text, sampled_text + end_text, said.content}
    texts |= {text.partition(end)[0] for text in tuple(texts) for end in stop if end}
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": text} for text in texts]
    if said.calls:
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in said.calls]
        messages += [{"role": "assistant", "content": text, "tool_calls": calls} for text in (said.content, "")]
    return frozenset(map(_digest, messages))


def extend(
    renderer: ChatRenderer,
    turns: Sequence[Turn],
    messages: list[dict],
    history: History,
    tools: list[dict] | None,
    kwargs: dict[str, Any],
) -> tuple[Rendered, Turn] | None:
    """Returns a prompt that continues an earlier turn's tokens exactly, and that turn. None: it continues no turn.

    Args:
        turns: earlier turns of the rollout, oldest first.
        messages, history, tools: of the new prompt.
        kwargs: further variables of the chat template.
    """
    continued = [turn for turn in reversed(turns) if turn.tools == tools and _continues(history, turn)]
    for turn in sorted(continued, key=lambda turn: -len(turn.history)):
        count = len(turn.history)
        ids = _ids_between(renderer, turn, messages[:count], messages[count:], kwargs)
        if ids is not None:
            return _extended(renderer, turn, ids, messages), turn
    return None


def left_turn(turns: Sequence[Turn], messages: Sequence[dict], history: History, continued: Turn | None) -> Turn | None:
    """Returns the newest turn of the conversation whose sampled tokens a prompt leaves behind. None: it leaves none.

    It does if an answer in it was edited or left out, or an earlier message or the tools changed after an answer.
    """
    if continued is None:
        begun = next((turn.history for turn in turns if history[: len(turn.history)] == turn.history != history), None)
    else:
        is_fork = any(message.get("role") == "assistant" for message in messages[len(continued.history) + 1 :])
        begun = continued.history if is_fork else None
    return None if begun is None else next(t for t in reversed(turns) if t.history[: len(begun)] == begun)


def _continues(history: History, turn: Turn) -> bool:
    count = len(turn.history)
    return len(history) > count and history[count] in turn.answers and history[:count] == turn.history


def _ids_between(
    renderer: ChatRenderer, turn: Turn, before: list[dict], messages: list[dict], kwargs: dict[str, Any]
) -> np.ndarray | None:
    """Returns the ids between the turn's last token and the next answer. None: the template does not show them.

    Args:
        before: the turn's prompt. Templates may refuse a shorter one, say without a system message.
        messages: the turn's answer, and the messages after it.
    """
    if isinstance(renderer, FamilyRenderer):
        return renderer.ids_between(turn.prompt_ids, turn.completion_ids, messages, turn.tools, kwargs)
    for head in ([QUESTION], before):
        text = _text_between(renderer, turn, head, messages[0], messages[1:], kwargs)
        if text is not None:
            return _encoded_behind(renderer, turn, text)
    return None


def _encoded_behind(renderer: ChatRenderer, turn: Turn, text: str) -> np.ndarray:
    """Returns the ids of a text behind the turn's end token, which takes white space away in some tokenizers.

    If the answer has no end token, a full stop stands for it: some tokenizers encode a text's first word as if it
    followed a space.
    """
    end = turn.end_text or "."
    begin, ids = renderer.encode(end), renderer.encode(end + text)
    is_kept = np.array_equal(ids[: len(begin)], begin) and (not turn.end_text or begin[-1] == turn.completion_ids[-1])
    return ids[len(begin) :] if is_kept else renderer.encode(text)


def _text_between(
    renderer: ChatRenderer, turn: Turn, head: list[dict], answer: dict, new: list[dict], kwargs: dict[str, Any]
) -> str | None:
    for known in _known_answers(answer):
        asked = _text_if_taken(renderer, turn, [*head, known, *new], kwargs, ask=True)
        closed = _text_if_taken(renderer, turn, [*head, known], kwargs, ask=False)
        closing, rest = closed.partition(KNOWN_ANSWER)[2], asked.partition(KNOWN_ANSWER)[2]
        # The end token closes the answer or, in GLM's templates, opens the message after it.
        end = rest.find(turn.end_text) if turn.end_text else -1
        if end >= 0 and not rest[len(closing) : end].strip():
            return rest[end + len(turn.end_text) :]
        if rest and "tool_calls" not in known and (closed or end < 0):
            return rest
    return None


def _text_if_taken(renderer: ChatRenderer, turn: Turn, messages: list[dict], kwargs: dict[str, Any], ask: bool) -> str:
    """Returns the text of a conversation. Empty: the template refuses it, as it may any order of messages."""
    try:
        return renderer.render_text(messages, turn.tools, kwargs, ask=ask)
    except (TemplateError, TypeError, ValueError):
        return ""


def _known_answers(answer: dict) -> Iterator[dict]:
    """Yields short answers in place of a real one: with its tool calls if it has some, then as text."""
    calls = [
        {"type": "function", **call, "function": dict(call["function"])} for call in answer.get("tool_calls") or []
    ]
    if calls:
        calls[-1]["function"]["arguments"] = {"x": KNOWN_ANSWER}
        yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield {"role": "assistant", "content": KNOWN_ANSWER}


def _extended(renderer: ChatRenderer, turn: Turn, suffix_ids: np.ndarray, messages: list[dict]) -> Rendered:
    """Returns the turn's tokens, followed by ``suffix_ids``, which hold the placeholders of the new images."""
    images = images_of(messages)
    added = renderer.with_images("", suffix_ids, images[len(turn.image_spans) :])
    token_ids = np.concatenate((turn.prompt_ids, turn.completion_ids, suffix_ids))
    spans = np.concatenate((turn.image_spans, added.image_spans + np.int32(len(token_ids) - len(suffix_ids))))
    return Rendered(renderer.decode(token_ids.tolist()), token_ids, images, spans)


def _digest(message: dict) -> bytes:
    plain = plain_message(message)
    role, content = plain.get("role"), plain["content"]
    if isinstance(message.get("content"), list) and any(map(is_image, message["content"])):
        content = [*content, *(hashlib.sha256(image).digest() for image in images_of([message]))]
    if role == "assistant" and isinstance(content, str):
        content = spoken(content)
    calls = [(call["function"].get("name"), _canonical(call["function"])) for call in plain.get("tool_calls", [])]
    try:
        encoded = msgspec.msgpack.encode((role, message.get("name"), content, calls))
    except (TypeError, OverflowError) as error:
        raise DomainError(f"a prompt's messages must be plain JSON values: {error}") from error
    return hashlib.blake2b(encoded, digest_size=16).digest()


def spoken(text: str) -> str:
    """Returns an answer without the thought before it."""
    _, closed, answer = text.rpartition("</think>")
    return "" if not closed and text.lstrip().startswith("<think>") else answer.strip()


def _canonical(function: dict) -> str:
    """Returns the arguments of a call in one spelling, for JSON that another language may have written."""
    arguments = function.get("arguments")
    return json.dumps(_whole_numbers(arguments) if arguments not in (None, "") else {}, sort_keys=True, default=str)


def _whole_numbers(value: Any) -> Any:
    """Turns 1.0 into 1, as JavaScript writes it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value
