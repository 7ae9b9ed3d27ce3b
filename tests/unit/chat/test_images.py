"""Images of messages, and the prompt that a server read in place of the one that was sent."""

import contextlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelinerl.chat.images import (
    check_expansion,
    describe_image,
    image_bytes,
    images_of,
    open_image,
    placeholder_id,
)
from pipelinerl.errors import DomainError, ServerError
from tests.says import says
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
        ({"type": "image", "image": Picture()}, says("'image'", "Picture", "image_url")),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a!"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,a"}}, "without an image, 'data:image/png,a'"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "without an image"),
        ({"type": "image", "image": b""}, "holds no image"),
        ({"type": "image", "image": np.zeros((2, 2))}, "holds ndarray"),
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


def test_damaged_or_too_large_image_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be decoded"):
        open_image(picture(40, 30)[:60])
    monkeypatch.setattr("pipelinerl.chat.images.MAX_PIXELS", 1199)
    with pytest.raises(ValueError, match=says("40 × 30", 1199)):
        open_image(picture(40, 30))


def test_image_of_more_than_64_mebipixels_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ValueError, match="8192 × 8193"):
        open_image(encoded(Image.new("1", (8192, 8193))))


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def half_transparent(mode: str) -> Image.Image:
    """Black, and transparent on the left: drawings often are, and without a background they are black on black."""
    image = Image.new("RGBA", (8, 4), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 3, 4))
    return image.convert(mode)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))
OTHER = PHOTO.transpose(Image.Transpose.ROTATE_180)
KINDS = {
    "RGBA": encoded(half_transparent("RGBA")),
    "LA": encoded(half_transparent("LA")),
    "P": encoded(half_transparent("RGBA").quantize(4)),
    "tRNS": encoded(Image.new("RGB", (8, 4), "red"), transparency=(255, 0, 0)),
    "half": encoded(Image.new("RGBA", (8, 4), (200, 100, 50, 77))),
    "turned": encoded(PHOTO, "JPEG", exif=turned()),
    "CMYK": encoded(PHOTO.convert("CMYK"), "JPEG"),
    "grey": encoded(PHOTO.convert("L")),
    "bits": encoded(PHOTO.convert("1")),
    "moving": encoded(PHOTO, "GIF", save_all=True, append_images=[OTHER]),
    "moving WebP": encoded(PHOTO, "WEBP", save_all=True, append_images=[OTHER], lossless=True),
    "moving PNG": encoded(PHOTO, "PNG", save_all=True, append_images=[OTHER]),
    "BMP": encoded(PHOTO, "BMP"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_image_has_the_pixels_that_vllms_own_routes_see(kind: str) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    expected = ImageMediaIO().load_bytes(KINDS[kind]).media
    found = open_image(KINDS[kind])
    assert found.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_image_is_upright_and_on_white() -> None:
    assert open_image(KINDS["turned"]).size == (30, 40)
    assert open_image(KINDS["RGBA"]).getpixel((0, 0)) == (255, 255, 255)
    assert open_image(KINDS["RGBA"]).getpixel((7, 0)) == (0, 0, 0)


def declared(width: int, height: int) -> bytes:
    """A PNG of few bytes that says it has this size."""
    data = bytearray(picture(40, 30))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", says("0 bytes", "PNG", "JPEG", "WEBP", "GIF", "BMP")),
        (b"<svg/>", says("6 bytes", "PNG")),
        (encoded(PHOTO, "TIFF"), says("PNG")),
        (picture(40, 30)[:200], says("decoded", "truncated")),
        (encoded(PHOTO, "JPEG")[:400], "cannot be decoded: .*runcated"),
        (declared(50_000, 50_000), says("decoded", "2500000000 pixels")),
        (declared(9_000, 9_000), "9000 × 9000 pixels, more than 67108864"),
        (declared(0, 30), "cannot be decoded|damaged"),
        (encoded(Image.fromarray(np.full((4, 4), 40000, np.uint16))), says("grey", 255, "8 bits")),
    ],
)
def test_hostile_image_says_what_is_wrong_with_it(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_image(data)
    assert describe_image(data).startswith("[image ")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_image_is_decoded_or_refused_and_nothing_else(kind: str) -> None:
    """Bytes changed anywhere, with checksums that fit again in every second PNG."""
    random = np.random.default_rng(0)
    for turn in range(40):
        data = bytearray(KINDS[kind])
        for place in random.integers(0, len(data), 4):
            data[place] = random.integers(0, 256)
        if turn % 2 and data[:4] == b"\x89PNG":
            data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
        with contextlib.suppress(ValueError):
            assert open_image(bytes(data)).mode == "RGB"
        assert describe_image(bytes(data)).startswith("[image ")


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
