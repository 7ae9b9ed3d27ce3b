"""Finds the images of messages and the tokens that stand for them.

A chat template writes one placeholder token per image. The server replaces it by the tokens of the image, and returns
the prompt that it read. Placeholders are identified by position, because a model can sample their token, too.
"""

import base64
import contextlib
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelinerl.errors import DomainError, ServerError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of a content part that hold one image, in the APIs of OpenAI and transformers."""
TOKEN_KEYS = ("image_token_id", "image_token_index")
"""Names of the placeholder's id in models' config.json."""
EXAMPLE = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}'


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are decoded."""
MAX_PIXELS = 64 * 2**20
"""Pixels of the largest image, 192 MiB as RGB. A small file can claim any number of them."""


def is_image(part: Any) -> bool:
    """Whether a content part holds an image."""
    return isinstance(part, dict) and str(part.get("type")) in IMAGE_PARTS


def images_of(messages: Sequence[dict]) -> tuple[bytes, ...]:
    """Returns the encoded images of a conversation, in order. Raises ``DomainError`` for one without data."""
    contents = (message.get("content") for message in messages)
    return tuple(
        image_bytes(part) for content in contents if isinstance(content, list) for part in content if is_image(part)
    )


def image_bytes(part: dict) -> bytes:
    """Returns the encoded image of a content part, such as the bytes of a PNG file."""
    value = part.get(part["type"], part.get("image_url"))
    value = value.get("url") if isinstance(value, dict) else value
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value.startswith("data:"):
        raise DomainError(
            f"a message has a part of type {part['type']!r} that holds {_kind(value)}: give the image itself, as "
            f"{EXAMPLE} or as bytes under the key `image`. Nothing is downloaded during a rollout"
        )
    try:
        data = base64.b64decode(value.partition(";base64,")[2], validate=True)
    except ValueError as error:
        raise DomainError(f"a message has a data URL that is not base64 ({error}): give it as {EXAMPLE}") from error
    if not data:
        raise DomainError(f"a message has a data URL without an image, {value[:40]!r}: give it as {EXAMPLE}")
    return data


def open_image(data: bytes) -> "Image":
    """Decodes an image to RGB pixels as vLLM's routes do: upright, white where it is transparent, the first frame.

    Raises:
        ValueError: the data is not an image, or it is too large.
    """
    from PIL import Image, ImageOps

    image = _opened(data)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} × {image.height} pixels, more than {MAX_PIXELS}")
    if image.mode.startswith("I"):  # more than 8 bits
        raise ValueError("its grey values would be cut off at 255: save it with 8 bits per channel")
    try:
        with contextlib.suppress(Exception):  # an orientation that cannot be read is none
            image = ImageOps.exif_transpose(image)
        if image.mode == "RGB" or not image.has_transparency_data:
            return image.convert("RGB")
        seen = image.convert("RGBA")
        white = Image.new("RGB", seen.size, "white")
        white.paste(seen, mask=seen.getchannel("A"))
        return white
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"it cannot be decoded: {error}") from error


def _opened(data: bytes) -> "Image":
    """Reads an image's header. Raises ``ValueError``."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"its {len(data)} bytes are not a {', '.join(FORMATS)}, or damaged") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"it cannot be decoded: {error}") from error


def describe_size(image: "Image") -> str:
    """Returns a text with the size of a decoded image."""
    return f"[image {image.width}×{image.height}]"


def describe_image(data: bytes) -> str:
    """Returns a text with the size of an encoded image."""
    try:
        return describe_size(_opened(data))
    except ValueError:
        return "[image that cannot be decoded]"


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:40])
    return type(value).__name__ if value is not None and not isinstance(value, bytes) else "no image"


@cache
def placeholder_id(model: str) -> int | None:
    """Returns the id of the token that stands for an image in ``model``'s prompts. None: it takes no images."""
    from transformers.utils import cached_file

    file = Path(model) / "config.json"
    if not file.is_file():
        found = cached_file(model, "config.json", _raise_exceptions_for_missing_entries=False) if model else None
        if found is None:
            return None
        file = Path(found)
    config = json.loads(file.read_text(encoding="utf-8"))
    return next((config[key] for key in TOKEN_KEYS if isinstance(config.get(key), int)), None)


def placeholder_of(config: Any) -> int | None:
    """As ``placeholder_id``, for a configuration of transformers."""
    return next((value for key in TOKEN_KEYS if isinstance(value := getattr(config, key, None), int)), None)


def required_placeholder(model: str) -> int:
    """As ``placeholder_id``. Raises ``DomainError`` if the model takes no images."""
    token = placeholder_id(model)
    if token is None:
        raise DomainError(
            f"a message has an image, but {model or 'this model'!r} has no `image_token_id` in its config.json: use a "
            "model that takes images, or describe it in text"
        )
    return token


def placeholder_spans(token_ids: np.ndarray, model: str, count: int) -> np.ndarray:
    """Finds the placeholders of ``count`` images, int32 [count, 2]: (start, end exclusive).

    Raises:
        DomainError: the model takes no images, or its template wrote another number of placeholders.
    """
    if not count:
        return np.empty((0, 2), dtype=np.int32)
    token = required_placeholder(model)
    starts = np.flatnonzero(token_ids == token)
    if len(starts) != count:
        raise DomainError(
            f"the prompt has {count} images and {len(starts)} times the token {token} that stands for one: the chat "
            "template must write it once for every image, and no text may contain it"
        )
    return np.stack((starts, starts + 1), axis=1).astype(np.int32)


def check_expansion(
    sent_ids: np.ndarray, sent_spans: np.ndarray, read_ids: np.ndarray | None, read_spans: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompt and the spans of its images as the server read them.

    Raises:
        ServerError: the prompt differs from the one that was sent in more than tokens that stand for images.
    """
    if read_ids is None or read_spans is None or not _same_text(sent_ids, sent_spans, read_ids, read_spans):
        raise ServerError("the server read another prompt than the one that was sent", 502)
    return read_ids, read_spans


def _same_text(sent_ids: np.ndarray, sent_spans: np.ndarray, read_ids: np.ndarray, read_spans: np.ndarray) -> bool:
    if (read_ids.dtype, read_spans.dtype, read_spans.shape) != (np.int32, np.int32, sent_spans.shape):
        return False
    bounds = [0, *read_spans.ravel().tolist(), len(read_ids)]
    if bounds != sorted(bounds):
        return False
    pairs = zip(_between(sent_ids, sent_spans), _between(read_ids, read_spans), strict=True)
    return all(np.array_equal(sent, read) for sent, read in pairs)


def _between(token_ids: np.ndarray, spans: np.ndarray) -> list[np.ndarray]:
    """Returns the tokens before, between and after the spans."""
    bounds = [0, *spans.ravel().tolist(), len(token_ids)]
    return [token_ids[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
