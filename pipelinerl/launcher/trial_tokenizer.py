"""The tokenizer of the scripted model that tries a domain: the model's own, or a stand-in while it is not here."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.chat.families import renderer_of
from pipelinerl.chat.images import placeholder_id, required_placeholder
from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.launcher.chat_trial import Messages, Tools

END_TOKEN = 256  # the first number that is no byte
IMAGE = "\ufffc"
"""Unicode's character for an object in a text."""


class TokenizerLimitError(AttributeError):
    """The domain uses an attribute of the tokenizer that `ByteTokenizer` lacks."""


class PlainRenderer(ChatRenderer):
    """A chat template that takes every prompt, with messages and tools of what it rendered.

    `try_chat` tries the model's own template with them.
    """

    def __init__(self, tokenizer: Any, image: str):
        """``image``: what stands for an image in a text."""
        super().__init__(tokenizer)
        self.asked: list[tuple[Messages, Tools]] = []
        self._image = image

    def _apply(self, messages: Messages, tools: Tools, kwargs: dict[str, Any], ask: bool) -> str:
        self.asked.append((messages, tools))
        text = "".join(f"<{message['role']}>{self._said(message['content'])}<end>" for message in messages)
        return text + ("<assistant>" if ask else "")

    def _said(self, content: Any) -> str:
        if not isinstance(content, list):
            return str(content)
        return "".join(self._image if part["type"] == "image" else str(part["text"]) for part in content)


def with_plain_chat(tokenizer: Any) -> Any:
    """A shallow copy of the model's tokenizer, with the same backend. Its prompts are rendered in a plain way."""
    placeholder = placeholder_id(tokenizer.name_or_path)
    image = IMAGE if placeholder is None else tokenizer.convert_ids_to_tokens(placeholder)
    plain = copy.copy(tokenizer)
    plain.pipelinerl_renderers = {"": PlainRenderer(plain, image)}
    return plain


def asked_of(tokenizer: Any) -> list[tuple[Messages, Tools]]:
    """Messages and tools of every prompt that was rendered with a tokenizer of the trial."""
    renderer: PlainRenderer = renderer_of(tokenizer)  # type: ignore[assignment]
    return renderer.asked


class ByteTokenizer:
    """A stand-in for a tokenizer that is not on this machine: one token per byte, and one that ends a message."""

    all_special_ids = (END_TOKEN,)
    added_tokens_decoder: Mapping[int, Any] = {}
    eos_token_id = END_TOKEN

    def __init__(self, model: str = ""):
        self._model = model
        self.pipelinerl_renderers = {"": PlainRenderer(self, IMAGE)}

    @property
    def name_or_path(self) -> str:
        """The model. Raises ``TokenizerLimitError`` if its configuration is not on this machine yet."""
        if placeholder_id(self._model) is None and not (Path(self._model) / "config.json").is_file():
            raise TokenizerLimitError("name_or_path")
        return self._model

    @property
    def backend_tokenizer(self) -> "ByteBackend":
        return ByteBackend(self)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TokenizerLimitError("__call__")

    def __len__(self) -> int:
        raise TokenizerLimitError("__len__")

    def __contains__(self, token: str) -> bool:
        raise TokenizerLimitError("__contains__")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise TokenizerLimitError(name)


class ByteBackend:
    def __init__(self, tokenizer: ByteTokenizer):
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = False) -> "Encoding":
        before, *others = (list(part.encode()) for part in text.split(IMAGE))
        image = required_placeholder(self._tokenizer.name_or_path) if others else END_TOKEN
        return Encoding(before + [token for part in others for token in (image, *part)])

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        kept = bytes(token for token in token_ids if token < END_TOKEN)
        end = "<end>" if END_TOKEN in token_ids and not skip_special_tokens else ""
        return kept.decode(errors="replace") + end


class Encoding:
    def __init__(self, ids: list[int]):
        self.ids = ids
