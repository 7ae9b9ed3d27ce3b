"""Converts messages to tokens and back, such that every trained token is one that the server processed.

This module renders a conversation once (with a cache) and finds the tokens of a follow-up turn that EXTEND the tokens
already sampled. It is pure except for the tokenizer, and never talks to a server.

Prefix extension: the new messages may continue an earlier call of the same rollout, including its answer. The new
prompt is then ``earlier prompt ids + sampled ids + ids of the text that the template adds after the answer``. The added
text is found by rendering the conversation with and without the new messages. If the template changed anything before
that point, the whole turn is rendered again and starts another training sequence.
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

IMAGE_PARTS = ("image", "image_url", "input_image", "video", "video_url")
"""Types of a content part that hold pictures, in the APIs of OpenAI and transformers."""
CACHED_PROMPTS = 256
CACHED_BYTES = 32 * 2**20
"""A few prompts are enough, because the attempts of a group use the same one at about the same time. The limit in
bytes is for long prompts."""


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A conversation as text and as tokens."""

    text: str
    token_ids: np.ndarray
    """int32 [P]"""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """An earlier call of the rollout, with everything needed to continue it in a later prompt."""

    messages: list[dict]
    tools: list[dict] | None
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    sampled_text: str
    """The completion decoded, without the token that ended it."""
    end_text: str
    """Text of the token that ended it. Empty if the completion was cut."""
    said: ReadText
    """Content and tool calls found in the sampled text."""
    read: CallReader
    """The reader that found them."""
    prefix_version: int | None = None
    """Weight version of the first token sampled in this conversation. None if the server reports none."""


class ChatRenderer:
    """Renders with one tokenizer's chat template and caches the newest prompts, within the limits above."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        _keep_no_words(self._backend)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._prompts: OrderedDict[bytes, Rendered] = OrderedDict()
        self._cached_bytes = 0

    def encode(self, text: str) -> np.ndarray:
        """Returns the int32 ids of a text that already contains its special tokens."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of the tokens, including special tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        return self._backend.decode([token_id], skip_special_tokens=False)

    def is_end_token(self, token_id: int) -> bool:
        """Whether a token marks the end of a message and is not part of its text."""
        return token_id in self._special_ids

    def render(self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> Rendered:
        """Renders the prompt for the assistant's next message.

        Args:
            messages: in OpenAI format.
            tools: in OpenAI format, or None.
            kwargs: further variables of the chat template.
        """
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
        """Renders the text of a conversation.

        Args:
            messages: in OpenAI format.
            tools: offered to the model, in OpenAI format. None: no tools.
            kwargs: further variables of the chat template.
            ask: whether to add the opening of the assistant's next message.
        """
        return self._tokenizer.apply_chat_template(
            [plain_message(message) for message in messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=ask,
            **kwargs,
        )


def _keep_no_words(backend: Any) -> None:
    """Disables the cache of the tokenizer's model, which keeps the first 10,000 words forever and saves no time.

    If the tokenizer does not split at spaces, a "word" is a whole prompt, of which the cache keeps 4 KB.
    """
    model = getattr(backend, "model", None)
    resize = getattr(model, "_resize_cache", None)  # BPE and Unigram have one
    if resize is not None:
        resize(0)


def renderer_of(tokenizer: Any) -> ChatRenderer:
    """Returns the tokenizer's renderer. There is one per tokenizer."""
    renderer = getattr(tokenizer, "pipelinerl_renderer", None)
    if renderer is None:
        renderer = tokenizer.pipelinerl_renderer = ChatRenderer(tokenizer)
    return renderer


def _cached_bytes(key: bytes, rendered: Rendered) -> int:
    return len(key) + len(rendered.text) + rendered.token_ids.nbytes


def _cache_key(messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode((messages, tools, kwargs))
    except (TypeError, OverflowError) as error:
        for message in messages:
            plain_message(message)  # says it if the value is an image
        raise DomainError(f"a prompt's messages and tools must be plain JSON values: {error}") from error


def plain_message(message: dict) -> dict:
    """Converts a message to the form that chat templates expect: content as one string, tool arguments as objects."""
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
    if str(kind) in IMAGE_PARTS:
        raise DomainError(
            f"a message has a content part of type {kind!r}: images are not trained. The tokens of an image stand for "
            "features, which requests to servers, rollout records and micro-batches do not carry; describe it in text"
        )
    raise DomainError(f"a message has a content part of type {kind!r}; only parts of type 'text' are supported")


def _plain_tool_call(call: dict) -> dict:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # The model's arguments may not be valid JSON: then the template gets the text unchanged.
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
    """Returns prompt ids that continue an earlier turn's tokens exactly, and that turn. None if no turn is continued.

    Args:
        renderer: of the policy's tokenizer.
        turns: earlier turns of the rollout, oldest first.
        messages: the new prompt's messages.
        tools: the new prompt's tools.
        kwargs: further variables of the chat template.
    """
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
    """Whether the message equals the turn's answer: the same text, or the same content and tool calls."""
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
    """Returns the template's text after the sampled tokens. None if the template changed the text before."""
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
    """Returns the part of the rendered answer after the sampled tokens (such as a newline). None if they differ."""
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
