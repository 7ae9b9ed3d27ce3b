"""Images of messages, and the prompt that a server read in place of the one that was sent."""

from typing import Any

import numpy as np
import pytest

from pipelinerl.chat.images import (
    MAX_PIXELS,
    check_expansion,
    describe_image,
    image_bytes,
    images_of,
    open_image,
    placeholder_id,
)
from pipelinerl.errors import DomainError, ServerError
from tests.vision import picture


class Picture:
    """No bytes, as PIL's images."""


def test_images_are_taken_in_the_order_of_the_messages() -> None:
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [{"type": "image", "image": b"a"}, {"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,Yg=="}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": {"url": "data:;base64,Yw=="}}]},
    ]
    assert images_of(messages) == (b"a", b"b", b"c")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "holds 'https://example.org/a.png'"),
        ({"type": "image_url"}, "holds no image"),
        ({"type": "image", "image": Picture()}, "holds Picture: give the image itself"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a!"}}, "not base64"),
    ],
)
def test_image_that_is_not_given_is_refused(part: dict, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        image_bytes(part)


def test_image_is_decoded_and_described() -> None:
    image = picture(40, 30)
    assert open_image(image).size == (40, 30)
    assert describe_image(image) == "[image 40×30]"
    assert describe_image(b"x") == "[image that cannot be decoded]"


def test_image_that_is_none_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be decoded"):
        open_image(picture(40, 30)[:60])
    monkeypatch.setattr("pipelinerl.chat.images.MAX_PIXELS", 1199)
    with pytest.raises(ValueError, match="40 × 30 pixels, more than 1199"):
        open_image(picture(40, 30))
    assert MAX_PIXELS > 2**20


def test_model_without_a_description_takes_no_images(tmp_path: Any) -> None:
    assert placeholder_id("") is None
    (tmp_path / "config.json").write_text('{"image_token_index": 7}')
    assert placeholder_id(str(tmp_path)) == 7


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


SENT, SPANS = ids(1, 9, 2, 9, 3), np.array([[1, 2], [3, 4]], dtype=np.int32)


def test_servers_prompt_is_the_sent_one_with_other_tokens_for_images() -> None:
    read, spans = ids(1, 8, 9, 8, 2, 9, 9, 3), np.array([[1, 4], [5, 7]], dtype=np.int32)
    found = check_expansion(SENT, SPANS, read, spans)
    assert found[0] is read
    assert found[1] is spans


@pytest.mark.parametrize(
    ("read", "spans"),
    [
        (None, None),
        (ids(1, 9, 2, 9, 4), SPANS),
        (ids(1, 9, 2, 9, 3, 3), SPANS),
        (SENT, SPANS[:1]),
        (SENT, SPANS[::-1].copy()),
        (SENT, SPANS.astype(np.int64)),
        (SENT, np.array([[1, 2], [3, 9]], dtype=np.int32)),
    ],
)
def test_another_prompt_than_the_sent_one_is_a_failure_of_the_server(read: Any, spans: Any) -> None:
    with pytest.raises(ServerError, match="another prompt"):
        check_expansion(SENT, SPANS, read, spans)
