"""Puts the images of a request into its prompt. vLLM's processor makes their tokens and what the model sees in them.

The processor sees nothing of the prompt but the placeholders, so it cannot mistake another token for an image.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import MultiModalInput, mm_input

from pipelinerl.chat.images import open_image


class Processor(Protocol):
    """The part of vLLM's renderer that is used."""

    async def render_cmpl_async(self, prompts: Sequence[Any], *, skip_mm_cache: bool = False) -> Sequence[Any]: ...


class ImagePrompts:
    """Makes the engine's input of prompts with images.

    Args:
        placeholder: id of the token that stands for an image. None: the model takes no images.
    """

    def __init__(self, processor: Processor, placeholder: int | None):
        self._processor, self._placeholder = processor, placeholder

    async def prompt(
        self, token_ids: np.ndarray, spans: np.ndarray | None, images: Sequence[bytes], salt: str | None
    ) -> MultiModalInput:
        """Returns the prompt with the tokens of every image in its place.

        Args:
            token_ids: int32 [P], checked.
            spans: int32 [I, 2], the tokens that stand for each of the ``images``.
            salt: of the prefix cache.
        Raises:
            ValueError: the request cannot be answered.
        """
        if self._placeholder is None:
            raise ValueError("this server's model takes no images")
        rows = _checked(spans, len(images), len(token_ids)).tolist()
        made = await self._process(images, self._placeholder)
        ids: list[int] = []
        places, start = [], 0
        for index, (place, (first, end)) in enumerate(zip(made["mm_placeholders"]["image"], rows, strict=True)):
            tokens = made["prompt_token_ids"][place.offset : place.offset + place.length]
            if token_ids[first:end].tolist() not in ([self._placeholder], tokens):
                raise ValueError(f"tokens {first} to {end} are not those of image {index}, which has {len(tokens)}")
            ids += token_ids[start:first].tolist()
            places.append(replace(place, offset=len(ids)))
            ids += tokens
            start = end
        ids += token_ids[start:].tolist()
        return mm_input(ids, made["mm_kwargs"], made["mm_hashes"], {"image": places}, cache_salt=salt)

    async def _process(self, images: Sequence[bytes], placeholder: int) -> MultiModalInput:
        """Processes the images alone. The cache of their features belongs to the engine, which may not see this."""
        opened = await asyncio.to_thread(_opened, images)
        images_only = TokensPrompt(prompt_token_ids=[placeholder] * len(images), multi_modal_data={"image": opened})
        (made,) = await self._processor.render_cmpl_async([images_only], skip_mm_cache=True)
        return made


def _opened(images: Sequence[bytes]) -> list[Any]:
    opened = []
    for index, data in enumerate(images):
        try:
            opened.append(open_image(data))
        except ValueError as error:
            raise ValueError(f"image {index}: {error}") from error
    return opened


def image_spans_of(prompt: Any) -> np.ndarray | None:
    """Returns int32 [I, 2], (start, end exclusive) of each image in an engine's input. None without images."""
    places = prompt.get("mm_placeholders", {}).get("image")
    if places is None:
        return None
    return np.array([(place.offset, place.offset + place.length) for place in places], dtype=np.int32)


def _checked(spans: np.ndarray | None, count: int, num_tokens: int) -> np.ndarray:
    if spans is None or spans.dtype != np.int32 or spans.shape != (count, 2):
        raise ValueError(f"image_spans must be int32 of shape ({count}, 2)")
    flat = spans.ravel()
    if flat[0] < 0 or flat[-1] > num_tokens or (np.diff(flat) < 0).any() or (spans[:, 0] == spans[:, 1]).any():
        raise ValueError(f"image_spans {spans.tolist()} are not ascending and within {num_tokens} tokens")
    return spans
