"""Problems with pictures reach a worker as the loader made them."""

import json
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image

from pipelinerl.actor.messages import StartGroup
from pipelinerl.actor.pictures import PNG, pack_pictures, unpack_pictures
from pipelinerl.actor.training import problem_text
from pipelinerl.actor.workers import encode_start

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


def test_other_values_stay_as_they_are() -> None:
    problem = {"a": {"b": 1}, "c": {PNG: b"x", "d": 1}, "e": [{"f": 2}], "g": b"bytes"}
    assert pack_pictures(problem) == problem
    assert unpack_pictures(problem) == problem


def test_problem_is_told_to_people_by_the_size_of_its_picture() -> None:
    told = json.loads(problem_text({"image": Image.fromarray(PIXELS), "file": b"abc", "path": Path("x")}))
    assert told == {"image": "[image 3×4]", "file": "[3 bytes]", "path": "x"}
