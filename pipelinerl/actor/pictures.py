"""Pictures in problems. PIL's images travel to a worker as PNG files, which keep every pixel."""

import io
from collections.abc import Mapping
from typing import Any

from pipelinerl.chat.images import describe_size

PNG = "pipelinerl_png"
"""Key of a mapping that stands for an image on its way."""
QUICK = 1
"""Compression level: the file lives for one message."""


def pack_pictures(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the problem with PIL's images among its fields, or in lists among them, as files."""
    return {name: _packed(value) for name, value in problem.items()}


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


def _packed(value: Any) -> Any:
    if isinstance(value, list):
        return [_packed(item) for item in value]
    if not _is_picture(value):
        return value
    file = io.BytesIO()
    value.save(file, "PNG", compress_level=QUICK)
    return {PNG: file.getvalue()}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict) or value.keys() != {PNG}:
        return value
    from PIL import Image

    return Image.open(io.BytesIO(value[PNG]))
