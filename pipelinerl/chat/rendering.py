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
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from pipelinerl.chat.images import images_of, is_image, placeholder_spans, required_placeholder
from pipelinerl.chat.tool_calls import CallReader, ReadText
from pipelinerl.errors import DomainError

NO_SPANS = np.empty((0, 2), dtype=np.int32)
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
    images: tuple[bytes, ...] = ()
    """Encoded images, in the order of the messages."""
    image_spans: np.ndarray = field(default_factory=NO_SPANS.copy)
    """int32 [I, 2]: (start, end exclusive) of the tokens that stand for each image."""


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
    image_spans: np.ndarray = field(default_factory=NO_SPANS.copy)
    """int32 [I, 2]: (start, end exclusive) of the tokens of each image in the prompt."""


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
        images = images_of(messages)
        if images:
            required_placeholder(self._tokenizer.name_or_path)  # a template of text alone could not render them
        text = self.render_text(messages, tools, kwargs, ask=True)
        rendered = self.with_images(text, self.encode(text), images)
        self._prompts[key] = rendered
        self._cached_bytes += _cached_bytes(key, rendered)
        while len(self._prompts) > CACHED_PROMPTS or self._cached_bytes > CACHED_BYTES:
            self._cached_bytes -= _cached_bytes(*self._prompts.popitem(last=False))
        return rendered

    def with_images(self, text: str, token_ids: np.ndarray, images: tuple[bytes, ...]) -> Rendered:
        """Returns a text whose placeholders, one per image, are found."""
        model = self._tokenizer.name_or_path if images else ""
        return Rendered(text, token_ids, images, placeholder_spans(token_ids, model, len(images)))

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
    return len(key) + len(rendered.text) + rendered.token_ids.nbytes + sum(map(len, rendered.images))


def _cache_key(messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode((messages, tools, kwargs))
    except (TypeError, OverflowError) as error:
        for message in messages:
            images_of([message])  # says it if the value is an image
        raise DomainError(f"a prompt's messages and tools must be plain JSON values: {error}") from error


def plain_message(message: dict) -> dict:
    """Converts a message to the form that chat templates expect: content as one string, tool arguments as objects.

    The content of a message with images stays a list of parts, from which the template makes placeholders.
    """
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list) and any(map(is_image, content)):
        plain["content"] = [_template_part(part) for part in content]
    elif isinstance(content, list):
        plain["content"] = "\n".join(_part_text(part) for part in content)
    elif content is None:
        plain["content"] = ""
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    return plain


def _template_part(part: Any) -> dict:
    return {"type": "image"} if is_image(part) else {"type": "text", "text": _part_text(part)}


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise DomainError(f"a message has a content part of type {kind!r}; only text and images are supported")


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
) -> tuple[Rendered, Turn] | None:
    """Returns a prompt that continues an earlier turn's tokens exactly, and that turn. None if no turn is continued.

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
                return _extended(renderer, turn, renderer.encode(suffix), messages), turn
    return None


def _extended(renderer: ChatRenderer, turn: Turn, suffix_ids: np.ndarray, messages: list[dict]) -> Rendered:
    """Returns the turn's tokens with ``suffix_ids`` after them, which hold the placeholders of the new images."""
    images = images_of(messages)
    added = renderer.with_images("", suffix_ids, images[len(turn.image_spans) :])
    token_ids = np.concatenate((turn.prompt_ids, turn.completion_ids, suffix_ids))
    spans = np.concatenate((turn.image_spans, added.image_spans + np.int32(len(token_ids) - len(suffix_ids))))
    return Rendered(renderer.decode(token_ids.tolist()), token_ids, images, spans)


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
    if not isinstance(content, str):
        return False
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
