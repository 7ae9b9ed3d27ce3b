"""The tokenizer of the scripted model that tries a domain: the model's own, or a stand-in while it is not here."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipelinerl.chat.images import placeholder_id, required_placeholder
from pipelinerl.launcher.chat_trial import Messages, Tools

END_TOKEN = 256  # the first number that is no byte
IMAGE = "\ufffc"
"""Unicode's character for an object in a text."""


class TokenizerLimitError(AttributeError):
    """The domain uses an attribute of the tokenizer that `ByteTokenizer` lacks."""


class PlainChat:
    """A chat template that takes every prompt, with messages and tools of what it rendered.

    `try_chat` tries the model's own template with them.
    """

    encode: Callable[..., Any]
    pipelinerl_renderers = None  # of the plain chat, not of the model's tokenizer
    image = IMAGE
    """What stands for an image in a text."""

    def __init__(self) -> None:
        self.asked: list[tuple[Messages, Tools]] = []

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> Any:
        self.asked.append((messages, tools))
        text = "".join(f"<{message['role']}>{self.said(message['content'])}<end>" for message in messages)
        text += "<assistant>" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text

    def said(self, content: Any) -> str:
        if not isinstance(content, list):
            return str(content)
        return "".join(self.image if part["type"] == "image" else str(part["text"]) for part in content)


class ModelTokenizer(PlainChat):
    """The model's tokenizer."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = tokenizer
        placeholder = placeholder_id(tokenizer.name_or_path)
        self.image = IMAGE if placeholder is None else tokenizer.convert_ids_to_tokens(placeholder)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __contains__(self, token: str) -> bool:
        return token in self._tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class ByteTokenizer(PlainChat):
    """A stand-in for a tokenizer that is not on this machine: one token per byte, and one that ends a message."""

    all_special_ids = (END_TOKEN,)
    added_tokens_decoder: Mapping[int, Any] = {}
    eos_token_id = END_TOKEN

    def __init__(self, model: str = ""):
        super().__init__()
        self._model = model

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
