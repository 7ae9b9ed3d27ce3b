"""Messages to tokens and back, so that every token that is trained is one that the server saw.

Owns: rendering a conversation once (cached), and finding the tokens of a follow-up turn that EXTEND the tokens already
sampled. Pure but for the tokenizer; never talks to a server.

Prefix extension: when the new messages continue an earlier call of the same rollout with its own answer, the new
prompt is ``earlier prompt ids + sampled ids + ids of what the template adds after the answer``. What it adds is found
by rendering with and without the rest; if the template rewrote anything before that point, the turn is rendered
afresh and starts another training sequence.
"""

import contextlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pipelinerl.chat.tool_calls import CallReader, ReadText
from pipelinerl.errors import DomainError

CACHED_PROMPTS = 256
CACHED_BYTES = 32 * 2**20
"""Attempts of a group ask the same at about the same time: few prompts are worth keeping, and they may be long."""


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A conversation as text and as tokens."""

    text: str
    token_ids: np.ndarray
    """int32 [P]"""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """An earlier call of the rollout, as far as a later prompt can continue it."""

    messages: list[dict]
    tools: list[dict] | None
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    sampled_text: str
    """The completion decoded, without the token that ended it."""
    end_text: str
    """Text of the token that ended it; empty when the completion was cut."""
    said: ReadText
    """What was read in it."""
    read: CallReader
    """How it was read."""
    prefix_version: int | None = None
    """Weight version of the first token that was sampled in this conversation; None when the server names none."""


class ChatRenderer:
    """Renders with one tokenizer's chat template; the newest conversations are kept, as many as the bounds allow."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        _keep_no_words(self._backend)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._prompts: OrderedDict[bytes, Rendered] = OrderedDict()
        self._cached_bytes = 0

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a text that already holds its special tokens."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, special tokens included."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self._backend.decode([token_id], skip_special_tokens=False)

    def is_end_token(self, token_id: int) -> bool:
        """Whether a token ends a message rather than being part of it."""
        return token_id in self._special_ids

    def render(self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> Rendered:
        """The prompt that asks for the assistant's next message."""
        key = _cache_key(messages, tools, kwargs)
        cached = self._prompts.get(key)
        if cached is not None:
            self._prompts.move_to_end(key)
            return cached
        text = self.render_text(messages, tools, kwargs, ask=True)
        rendered = Rendered(text, self.encode(text))
        self._prompts[key] = rendered
        self._cached_bytes += _cached_bytes(key, rendered)
        while len(self._prompts) > CACHED_PROMPTS or self._cached_bytes > CACHED_BYTES:
            self._cached_bytes -= _cached_bytes(*self._prompts.popitem(last=False))
        return rendered

    def render_text(self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any], *, ask: bool) -> str:
        """The template's text; ``ask`` adds the opening of the assistant's next message."""
        return self._tokenizer.apply_chat_template(
            [plain_message(message) for message in messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=ask,
            **kwargs,
        )


def _keep_no_words(backend: Any) -> None:
    """Switch off the cache of the tokenizer's model: it keeps the first 10,000 words for ever and makes nothing faster.

    Where the tokenizer does not split at spaces a word is a whole prompt, of which 4 KB are kept.
    """
    model = getattr(backend, "model", None)
    resize = getattr(model, "_resize_cache", None)  # BPE and Unigram have one
    if resize is not None:
        resize(0)


def renderer_of(tokenizer: Any) -> ChatRenderer:
    """The tokenizer's renderer, one per tokenizer."""
    renderer = getattr(tokenizer, "_pipelinerl_renderer", None)
    if renderer is None:
        renderer = tokenizer._pipelinerl_renderer = ChatRenderer(tokenizer)
    return renderer


def _cached_bytes(key: bytes, rendered: Rendered) -> int:
    return len(key) + len(rendered.text) + rendered.token_ids.nbytes


def _cache_key(messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode((messages, tools, kwargs))
    except (TypeError, OverflowError) as error:
        raise DomainError(f"a prompt's messages and tools must be plain JSON values: {error}") from error


def plain_message(message: dict) -> dict:
    """The message as chat templates expect it: text content as one string, tool arguments as objects."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_part_text(part) for part in content)
    elif content is None:
        plain["content"] = ""
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    return plain


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise DomainError(f"a message has a content part of type {kind!r}; only parts of type 'text' are supported")


def _plain_tool_call(call: dict) -> dict:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What the model wrote may not be JSON: the template gets it as it is.
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments)
    return {**call, "function": function}


def extend(
    renderer: ChatRenderer,
    turns: list[Turn],
    messages: list[dict],
    tools: list[dict] | None,
    kwargs: dict[str, Any],
) -> tuple[np.ndarray, Turn] | None:
    """Prompt ids that continue an earlier turn's tokens exactly, and that turn; None when no turn is continued."""
    for turn in reversed(turns):
        if _continues(turn, messages, tools):
            suffix = _suffix_after_answer(renderer, turn, messages, kwargs)
            if suffix is not None:
                return np.concatenate((turn.prompt_ids, turn.completion_ids, renderer.encode(suffix))), turn
    return None


def _continues(turn: Turn, messages: list[dict], tools: list[dict] | None) -> bool:
    count = len(turn.messages)
    return (
        len(messages) > count
        and turn.tools == tools
        and messages[:count] == turn.messages
        and _is_answer(messages[count], turn)
    )


def _is_answer(message: dict, turn: Turn) -> bool:
    """Whether the message is what this turn sampled: the same text, or the same content and tool calls."""
    if message.get("role") != "assistant":
        return False
    plain = plain_message(message)
    content, calls = plain["content"], plain.get("tool_calls", [])
    if not calls:
        return content.removesuffix(turn.end_text) == turn.sampled_text
    named = [(call["function"].get("name"), call["function"].get("arguments")) for call in calls]
    return named == turn.said.calls and content.strip() == turn.said.content.strip()


def _suffix_after_answer(
    renderer: ChatRenderer, turn: Turn, messages: list[dict], kwargs: dict[str, Any]
) -> str | None:
    """What the template writes after the sampled tokens, or None when it rewrote what came before."""
    count = len(turn.messages)
    answer = messages[count]
    if turn.end_text and isinstance(answer.get("content"), str):
        answer = {**answer, "content": answer["content"].removesuffix(turn.end_text)}
    conversation = [*turn.messages, answer, *messages[count + 1 :]]
    asked = renderer.render_text(turn.messages, turn.tools, kwargs, ask=True)
    answered = renderer.render_text(conversation[: count + 1], turn.tools, kwargs, ask=False)
    whole = renderer.render_text(conversation, turn.tools, kwargs, ask=True)
    if not (answered.startswith(asked) and whole.startswith(answered)):
        return None
    closing = _closing(answered[len(asked) :], turn)
    if closing is None:
        return None
    return closing + whole[len(answered) :]


def _closing(answer_text: str, turn: Turn) -> str | None:
    """The part of the rendered answer that follows what was sampled (end marker, newline), or None if they differ."""
    if answer_text.startswith(turn.sampled_text + turn.end_text):
        return answer_text[len(turn.sampled_text) + len(turn.end_text) :]
    if not turn.end_text or turn.end_text not in answer_text:
        return None
    written, _, closing = answer_text.rpartition(turn.end_text)
    if not turn.said.calls:
        return None
    told = turn.read(written)
    same = told.calls == turn.said.calls and told.content.strip() == turn.said.content.strip()
    return closing if same else None
