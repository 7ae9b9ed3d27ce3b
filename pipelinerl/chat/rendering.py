"""Renders whole conversations to tokens with a chat template, and caches the newest."""

import contextlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipelinerl.chat.images import images_of, is_image, placeholder_spans, required_placeholder
from pipelinerl.errors import ConfigError, DomainError

NO_SPANS = np.empty((0, 2), dtype=np.int32)
CACHED_PROMPTS = 256
CACHED_BYTES = 32 * 2**20
"""A few prompts are enough, because the attempts of a group use the same one at about the same time. The limit in
bytes keeps long prompts from filling a worker's memory."""


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


class ChatRenderer:
    """Renders with one tokenizer's chat template and caches the newest prompts, within the limits above."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        _keep_no_words(self._backend)
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = frozenset(tokenizer.all_special_ids).union(id_ for id_, token in added if token.special)
        self._prompts: OrderedDict[bytes, Rendered] = OrderedDict()
        self._cached_bytes = 0

    def prepare(self, kwargs: dict[str, Any]) -> None:
        """Raises ``ConfigError`` if ``render`` would for these ``kwargs``. Templates only fail when they render."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the int32 ids of a text that already contains its special tokens."""
        _keep_whole(self._backend)
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

        ``messages`` and ``tools`` are in OpenAI format, ``kwargs`` are further variables of the chat template.
        """
        key = _cache_key(messages, tools, kwargs)
        cached = self._prompts.get(key)
        if cached is not None:
            self._prompts.move_to_end(key)
            return cached
        rendered = self._rendered(messages, tools, kwargs)
        self._prompts[key] = rendered
        self._cached_bytes += _cached_bytes(key, rendered)
        while len(self._prompts) > CACHED_PROMPTS or self._cached_bytes > CACHED_BYTES:
            self._cached_bytes -= _cached_bytes(*self._prompts.popitem(last=False))
        return rendered

    def _rendered(self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> Rendered:
        images = images_of(messages)
        if images:
            required_placeholder(self._tokenizer.name_or_path)  # raises for a text model, whose template fails
        text = self.render_text(messages, tools, kwargs, ask=True)
        return self.with_images(text, self.encode(text), images)

    def with_images(self, text: str, token_ids: np.ndarray, images: tuple[bytes, ...]) -> Rendered:
        """Returns a text with its images and the positions of their placeholders, one per image."""
        model = self._tokenizer.name_or_path if images else ""
        return Rendered(text, token_ids, images, placeholder_spans(token_ids, model, len(images)))

    def render_text(self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any], *, ask: bool) -> str:
        """Renders the text of a conversation.

        ``ask``: whether to add the opening of the assistant's next message. The others are as for ``render``.
        """
        plain = [plain_message(message) for message in messages]
        try:
            return self._apply(plain, tools, kwargs, ask)
        except TypeError:
            if not any("tool_calls" in message for message in plain):
                raise
            return self._apply([_with_written_arguments(message) for message in plain], tools, kwargs, ask)

    def _apply(self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any], ask: bool) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=ask, **kwargs
        )


def _keep_whole(backend: Any) -> None:
    """Turns truncation and padding off, which stay on after a domain's ``tokenizer(text, truncation=True)``."""
    if getattr(backend, "truncation", None) is not None:
        backend.no_truncation()
    if getattr(backend, "padding", None) is not None:
        backend.no_padding()


def _keep_no_words(backend: Any) -> None:
    """Disables the cache of the tokenizer's model, which saves no time and keeps 10,000 words forever."""
    # Without a split at spaces, a word is a whole prompt, of which the cache keeps 4 KB.
    model = getattr(backend, "model", None)
    resize = getattr(model, "_resize_cache", None)  # BPE and Unigram have one
    if resize is not None:
        resize(0)


def _cached_bytes(key: bytes, rendered: Rendered) -> int:
    return len(key) + len(rendered.text) + rendered.token_ids.nbytes + sum(map(len, rendered.images))


def _cache_key(messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode((messages, tools, kwargs))
    except (TypeError, OverflowError) as error:
        for message in messages:
            images_of([message])  # raises a clearer error if the value is an image
        raise DomainError(f"a prompt's messages and tools must be plain JSON values: {error}") from error


def plain_message(message: dict) -> dict:
    """Converts a message to the form that chat templates expect: content as one string, tool arguments as objects.

    The content of a message with images stays a list of parts, from which the template makes placeholders.
    """
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list) and any(map(is_image, content)):
        plain["content"] = [
            {"type": "image"} if is_image(part) else {"type": "text", "text": _part_text(part)} for part in content
        ]
    elif isinstance(content, list):
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
    raise DomainError(f"a message has a content part of type {kind!r}; only text and images are supported")


def _plain_tool_call(call: dict) -> dict:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # The model's arguments may not be valid JSON: then the template gets the text unchanged.
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments)
    return {**call, "function": function}


def _with_written_arguments(message: dict) -> dict:
    """Returns the message with the arguments of its tool calls as JSON text, which DeepSeek's templates expect."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _written(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def template_options(chosen: str | None, variables: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns the options of rendering: ``llm.chat_template_kwargs``, and the ``chosen`` template if any."""
    template = {} if chosen is None else {"chat_template": chosen_template(chosen, tokenizer.chat_template)}
    return {**variables, **template}


def chosen_template(chosen: str, known: str | dict[str, str] | None) -> str:
    """Returns a chat template.

    Args:
        chosen: ``llm.chat_template``, a file or a name.
        known: the tokenizer's template, or all of them by name.

    Raises:
        ConfigError: ``chosen`` is neither a file nor a name.
    """
    named = known if isinstance(known, dict) else {}
    if chosen in named:
        return named[chosen]
    try:
        return Path(chosen).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"`llm.chat_template` is {chosen!r}, which is not a file ({error.strerror}); the tokenizer's templates are "
            f"{sorted(named) or 'not named'}: give the path of a Jinja template"
        ) from error
