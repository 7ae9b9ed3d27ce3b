"""Only text is rendered; an image is refused with what it would take."""

import pytest

from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.errors import DomainError
from pipelinerl.testing import byte_tokenizer


class Picture:
    """No JSON value, as PIL's images."""


def render(part: object) -> str:
    return ChatRenderer(byte_tokenizer()).render([{"role": "user", "content": [part]}], None, {}).text


def test_parts_of_text_are_rendered() -> None:
    assert "user\nseen<" in render({"type": "text", "text": "seen"})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "image", "image": Picture()},
    ],
)
def test_image_is_refused_with_what_is_missing(part: dict) -> None:
    with pytest.raises(DomainError, match=r"images are not trained\. .* records and micro-batches do not carry"):
        render(part)


def test_other_values_are_refused_as_they_are() -> None:
    with pytest.raises(DomainError, match="of type 'audio'; only parts of type 'text'"):
        render({"type": "audio"})
    with pytest.raises(DomainError, match="plain JSON values"):
        render({"type": "text", "text": "x", "more": Picture()})
