"""Renders with the code of a model family in the package `renderers`, for models without a chat template."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from pydantic import TypeAdapter, ValidationError

from pipelinerl.chat.images import images_of
from pipelinerl.chat.rendering import ChatRenderer, Rendered, plain_message
from pipelinerl.errors import ConfigError, DomainError

if TYPE_CHECKING:
    from renderers import Renderer

BY_NAME = ("auto", "default")
"""Choices of `renderers` that are not a family: by the model's name, and the tokenizer's own template."""


class FamilyRenderer(ChatRenderer):
    """Renders with a family of `renderers`, such as ``qwen3``."""

    def __init__(self, tokenizer: Any, family: str):
        super().__init__(tokenizer)
        self._family = family
        self._made: dict[bytes, Renderer] = {}

    def prepare(self, kwargs: dict[str, Any]) -> None:
        """Makes the family's renderer. Raises ``ConfigError`` as ``family_renderer`` does."""
        self._renderer(kwargs)

    def ids_between(
        self,
        prompt_ids: np.ndarray,
        completion_ids: np.ndarray,
        messages: list[dict],
        tools: list[dict] | None,
        kwargs: dict[str, Any],
    ) -> np.ndarray | None:
        """Returns the ids between an answer and the next one, int32 [N]. None: the family does not continue it.

        ``prompt_ids`` and ``completion_ids`` (int32) belong to the call of the answer, and ``messages`` begin with it.
        """
        bridged = self._renderer(kwargs).bridge_to_next_turn(
            prompt_ids.tolist(), completion_ids.tolist(), _plain(messages)[1:], tools=tools
        )
        if bridged is None:
            return None
        before, ids = np.concatenate((prompt_ids, completion_ids)), np.array(bridged.token_ids, dtype=np.int32)
        return ids[len(before) :] if np.array_equal(ids[: len(before)], before) else None

    def _rendered(self, messages: list[dict], tools: list[dict] | None, kwargs: dict[str, Any]) -> Rendered:
        if images_of(messages):
            raise DomainError("a prompt has images, which `llm.renderer` does not take: remove it, or the images")
        ids = self._renderer(kwargs).render_ids(_plain(messages), tools=tools, add_generation_prompt=True)
        return Rendered(self.decode(ids), np.array(ids, dtype=np.int32))

    def _renderer(self, kwargs: dict[str, Any]) -> "Renderer":
        key = msgspec.json.encode(kwargs)
        if key not in self._made:
            self._made[key] = family_renderer(self._tokenizer, self._family, kwargs)
        return self._made[key]


def family_renderer(tokenizer: Any, family: str, kwargs: Mapping[str, Any]) -> "Renderer":
    """Returns the family's renderer. Raises ``ConfigError`` as ``check_family``, or if the tokenizer does not fit."""
    config = check_family(family, kwargs)
    import renderers  # is installed, or check_family refuses

    try:
        return renderers.create_renderer(tokenizer, config)
    except (AssertionError, ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(
            f"`llm.renderer` is {family!r}, which does not fit the tokenizer {tokenizer.name_or_path!r}: {error}"
        ) from error


def check_family(family: str, kwargs: Mapping[str, Any]) -> Any:
    """Returns the family's configuration in `renderers`. Thoughts stay in the history unless ``kwargs`` says otherwise.

    Raises:
        ConfigError: the package is not installed, or has no such family, or the family has no such option.
    """
    try:
        import renderers
    except ImportError as error:
        raise ConfigError(
            f"`llm.renderer` is {family!r}, which needs a package ({error}): pip install 'pipelinerl[renderers]'"
        ) from error
    if family in BY_NAME:
        raise ConfigError(f"`llm.renderer` is {family!r}: name a family, or leave it null for the chat template")
    options = {"thinking_retention": "all", **kwargs, "name": family}
    try:
        return TypeAdapter(renderers.RendererConfig).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        named = ".".join(map(str, first["loc"][1:]))
        raise ConfigError(
            f"`llm.renderer` is {family!r} with `chat_template_kwargs`={dict(kwargs)}: "
            f"{f'{named}: ' if named else ''}{first['msg']}"
        ) from error


def _plain(messages: list[dict]) -> list[dict]:
    """Returns messages as templates expect them. A tool's result gets its tool's name, which some families write."""
    import renderers

    plain = [plain_message(message) for message in messages]
    names = renderers.extract_message_tool_names(plain)
    return [message if name is None else {**message, "name": name} for message, name in zip(plain, names, strict=True)]


def renderer_of(tokenizer: Any, family: str = "") -> ChatRenderer:
    """Returns the tokenizer's renderer, or that of a family of `renderers`. They are kept on the tokenizer."""
    known: dict[str, ChatRenderer] | None = getattr(tokenizer, "pipelinerl_renderers", None)
    if known is None:
        known = tokenizer.pipelinerl_renderers = {}
    if family not in known:
        known[family] = FamilyRenderer(tokenizer, family) if family else ChatRenderer(tokenizer)
    return known[family]
