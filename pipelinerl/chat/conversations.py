"""Finished conversations as training tokens: every answer with the tokens that a server would have sampled.

An answer's tokens are encoded apart from its prompt's, as a server samples them after the prompt. A later turn
continues the same sequence if the template leaves the earlier text as it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelinerl.chat.images import images_of
from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.errors import DomainError


@dataclass
class AnsweredText:
    """Tokens of one or more turns, and the spans of the assistant's answers."""

    text: str = ""
    """Up to the end of the last answer."""
    token_ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    """(start, end exclusive) of every answer, with the token that ends it."""
    messages: list[int] = field(default_factory=list)
    """Index in the conversation of every answer."""


class LeftOutByTemplateError(DomainError):
    """The chat template leaves out a part of a conversation."""


def answered_texts(
    renderer: ChatRenderer, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]
) -> list[AnsweredText]:
    """Returns the sequences of a conversation, up to its last answer.

    Args:
        messages, tools: in OpenAI format.
        kwargs: further variables of the chat template.
    Raises:
        LeftOutByTemplateError: the template leaves out tools, or thoughts or tool calls of an answer.
        DomainError: it has images, or the template renders an answer other than as a continuation of its prompt.
    """
    if images_of(messages):
        raise DomainError("a conversation to train on has images: only text is supported")
    found: list[AnsweredText] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        asked = renderer.render_text(messages[:index], tools, kwargs, ask=True)
        answered = renderer.render_text(messages[: index + 1], tools, kwargs, ask=False)
        if not answered.startswith(asked):
            raise DomainError(
                f"the chat template does not render message {index} as a continuation of its prompt, which ends in "
                f"{asked[-40:]!r}: a server would sample other tokens"
            )
        _check_rendered(message, answered[len(asked) :], tools or [], asked)
        if not (found and asked.startswith(found[-1].text)):
            found.append(AnsweredText())
        current = found[-1]
        current.token_ids += renderer.encode(asked[len(current.text) :]).tolist()
        answer, length = _answer(renderer, answered[len(asked) :])
        start = len(current.token_ids)
        current.token_ids += answer
        current.answers.append((start, len(current.token_ids)))
        current.messages.append(index)
        current.text = answered[: len(asked) + length]
    return found


def _check_rendered(message: dict[str, Any], answer: str, tools: list[dict], asked: str) -> None:
    """Raises ``LeftOutByTemplateError``: an answer without its tool calls would teach the model to call none."""
    thought = str(message.get("reasoning_content") or "").strip()
    if thought and thought not in answer:
        raise LeftOutByTemplateError("the chat template leaves out the thoughts of an answer")
    if not all(call["function"]["name"] in answer for call in message.get("tool_calls") or []):
        raise LeftOutByTemplateError("the chat template leaves out the tool calls of an answer")
    names = [tool.get("function", tool).get("name", "") for tool in tools]
    if not all(name in asked for name in names):
        raise LeftOutByTemplateError("the chat template leaves out the tools")


def _answer(renderer: ChatRenderer, rendered: str) -> tuple[list[int], int]:
    """Returns the tokens of a rendered answer up to its end token, and the length of their text."""
    token_ids = renderer.encode(rendered).tolist()
    ends = [k for k, token in enumerate(token_ids) if renderer.is_end_token(token)]
    if not ends:
        return token_ids, len(rendered)
    end_text = renderer.token_text(token_ids[ends[-1]])
    return token_ids[: ends[-1] + 1], rendered.rindex(end_text) + len(end_text)


def batch_spans(
    text: AnsweredText, prompt_weight: float, limit: int, weights: Mapping[int, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the trained tokens of a text that is cut after ``limit`` tokens.

    Args:
        prompt_weight: weight of the tokens outside the answers. 0 = they are not trained.
        weights: index of a message → weight of its answer. None: 1 for all.
    Returns:
        (int32 [R, 2] spans, float32 [K] weight of each token in them), both empty without an answer within the limit.
    """
    weights_T = np.full(min(len(text.token_ids), limit), prompt_weight, dtype=np.float32)
    for (start, end), message in zip(text.answers, text.messages, strict=True):
        weights_T[start:end] = 1.0 if weights is None else weights[message]
    weights_T[:1] = 0.0  # nothing predicts it
    is_answered = any((weights_T[start:end] > 0).any() for start, end in text.answers)
    trained_T = np.concatenate(([False], (weights_T > 0) & is_answered, [False]))
    edges = np.flatnonzero(trained_T[1:] != trained_T[:-1])
    return edges.reshape(-1, 2).astype(np.int32), weights_T[trained_T[1:-1]]
