"""Pictures in problems. PIL's images travel to a worker as files without loss, which keep every pixel."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelinerl.chat.images import describe_size
from pipelinerl.errors import DomainError

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE = "pipelinerl_picture"
"""Key of a mapping that stands for an image on its way."""
QUICK = 1
"""Compression level: the file lives for one message."""
FORMATS = dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "PNG") | dict.fromkeys(
    ("CMYK", "F", "I", "LAB", "PA"), "TIFF"
)
"""Format that keeps the pixels of PIL's mode."""


def pack_pictures(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the problem with PIL's images among its values, however deep in lists and dicts, as files.

    Raises ``DomainError`` for one that cannot be read, and names its field.
    """
    return {name: _packed(value, str(name)) for name, value in problem.items()}


def unpack_pictures(problem: dict[str, Any]) -> dict[str, Any]:
    """Returns a problem with its images as PIL's again."""
    return {name: _unpacked(value) for name, value in problem.items()}


def describe_value(value: Any) -> str:
    """Returns text for a value that JSON does not have."""
    if _is_picture(value):
        return describe_size(value)
    return f"[{len(value)} bytes]" if isinstance(value, bytes) else str(value)


def _is_picture(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") and hasattr(value, "save")


def _packed(value: Any, field: str) -> Any:
    if isinstance(value, list | tuple):
        return [_packed(item, field) for item in value]
    if isinstance(value, dict):
        return {name: _packed(item, f"{field}.{name}") for name, item in value.items()}
    return {PICTURE: _file_of(value, field)} if _is_picture(value) else value


def _file_of(picture: "Image", field: str) -> bytes:
    where = f"a problem's field `{field}` holds a {describe_size(picture)}"
    if picture.mode not in FORMATS:
        raise DomainError(f'{where} of mode {picture.mode}: give it as `image.convert("RGB")`')
    file = io.BytesIO()
    try:
        picture.save(file, FORMATS[picture.mode], compress_level=QUICK)
    except (OSError, SyntaxError, ValueError) as error:
        raise DomainError(f"{where} that cannot be read ({error}): mend it or leave the problem out") from error
    return file.getvalue()


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {PICTURE}:
        return {name: _unpacked(item) for name, item in value.items()}
    from PIL import Image

    return Image.open(io.BytesIO(value[PICTURE]))
