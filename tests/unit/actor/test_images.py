"""Problems with pictures reach a worker as the loader made them."""

import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from pipelinerl.actor.groups import problem_text
from pipelinerl.actor.messages import PICTURE, StartGroup, encode_start, pack_pictures, unpack_pictures
from pipelinerl.errors import DomainError
from tests.says import says
from tests.vision import picture

PIXELS = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3)


def start(problem: dict) -> StartGroup:
    return StartGroup(group_id="0-0", domain=0, problem=problem, attempts=(0,), evaluation=False, version=0)


def test_every_pixel_of_a_picture_reaches_the_worker() -> None:
    problem = {"image": Image.fromarray(PIXELS), "more": [Image.fromarray(PIXELS[:2])], "question": "?", "n": [1, 2]}
    sent = msgspec.msgpack.decode(encode_start(start(problem)))["problem"]
    read = unpack_pictures(sent)
    np.testing.assert_array_equal(np.asarray(read["image"]), PIXELS)
    np.testing.assert_array_equal(np.asarray(read["more"][0]), PIXELS[:2])
    assert (read["question"], read["n"]) == ("?", [1, 2])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "LAB", "F", "I", "PA"])
def test_picture_of_any_mode_that_files_have_keeps_its_pixels(mode: str) -> None:
    image = Image.fromarray(PIXELS)
    image = image.convert("P").convert("PA") if mode == "PA" else image.convert(mode)
    read = unpack_pictures(msgspec.msgpack.decode(encode_start(start({"a": {"b": [(image,)]}})))["problem"])["a"]["b"]
    assert read[0][0].mode == mode
    np.testing.assert_array_equal(np.asarray(read[0][0]), np.asarray(image))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            Image.open(io.BytesIO(picture(40, 30)[:300])),
            says("`a.b`", "[image 40×30]", "truncated"),
        ),
        (Image.fromarray(PIXELS).convert("HSV"), says("`a.b`", "HSV", '`image.convert("RGB")`')),
    ],
)
def test_picture_that_cannot_travel_names_its_field(image: Image.Image, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        encode_start(start({"a": {"b": image}}))


def test_other_values_stay_as_they_are() -> None:
    problem = {"a": {"b": 1}, "c": {PICTURE: b"x", "d": 1}, "e": [{"f": 2}], "g": b"bytes"}
    assert pack_pictures(problem) == problem
    assert unpack_pictures(problem) == problem


def test_problem_is_told_to_people_by_the_size_of_its_picture() -> None:
    told = json.loads(problem_text({"image": Image.fromarray(PIXELS), "file": b"abc", "path": Path("x")}))
    assert told == {"image": "[image 3×4]", "file": "[3 bytes]", "path": "x"}


def test_long_problem_is_cut_for_readers() -> None:
    assert len(problem_text({"task": "x" * 10_000})) == 4096
