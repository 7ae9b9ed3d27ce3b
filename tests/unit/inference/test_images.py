"""Images in a server's prompts: every placeholder is replaced where the client says, and nowhere else."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllm.multimodal.inputs import PlaceholderRange

from pipelinerl.inference.images import ImagePrompts, image_spans_of
from tests.says import says
from tests.vision import picture

IMAGE = 9


class Processor:
    """Makes of an image of w × h pixels the tokens ``7, 9 × w, 8``."""

    async def render_cmpl_async(self, prompts: Sequence[Any], *, skip_mm_cache: bool = False) -> Sequence[Any]:
        (prompt,) = prompts
        assert skip_mm_cache
        assert prompt["prompt_token_ids"] == [IMAGE] * len(prompt["multi_modal_data"]["image"])
        ids, places = [], []
        for image in prompt["multi_modal_data"]["image"]:
            tokens = [7, *[IMAGE] * image.width, 8]
            places.append(PlaceholderRange(offset=len(ids), length=len(tokens)))
            ids += tokens
        made = {"prompt_token_ids": ids, "mm_placeholders": {"image": places}}
        return [made | {"mm_kwargs": {"image": "pixels"}, "mm_hashes": {"image": ["hash"]}}]


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def spans(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int32).reshape(-1, 2)


PROMPTS = ImagePrompts(Processor(), IMAGE)
NARROW, WIDE = picture(1, 1), picture(2, 1)


async def test_placeholders_are_replaced_where_the_client_says() -> None:
    """The 9 at place 2 was sampled, and the tokens of the first image are those of an earlier answer."""
    made = await PROMPTS.prompt(ids(7, 9, 8, 9, 5, 9, 6), spans((0, 3), (5, 6)), (NARROW, WIDE), "3")
    assert made["prompt_token_ids"] == [7, 9, 8, 9, 5, 7, 9, 9, 8, 6]
    assert image_spans_of(made).tolist() == [[0, 3], [5, 9]]
    assert made["cache_salt"] == "3"
    assert made["mm_kwargs"] == {"image": "pixels"}
    assert image_spans_of({}) is None


@pytest.mark.parametrize(
    ("token_ids", "places", "images", "message"),
    [
        (ids(5, 9), spans((0, 1)), (NARROW,), says("tokens 0 to 1", "image 0", 3)),
        (ids(7, 9, 9, 8), spans((0, 4)), (NARROW,), says("tokens 0 to 4", "image 0")),
        (ids(9, 9), spans((1, 2), (0, 1)), (NARROW, WIDE), says("ascending")),
        (ids(9), spans((0, 2)), (NARROW,), says("ascending", "1 tokens")),
        (ids(9), spans((0, 0)), (NARROW,), says("ascending")),
        (ids(9), None, (NARROW,), says("image_spans", "int32")),
        (ids(9), spans((0, 1)), (NARROW, WIDE), says("image_spans", "(2, 2)")),
        (ids(9), spans((0, 1)), (b"no image",), says("image 0", "8 bytes", "PNG")),
    ],
)
async def test_request_that_cannot_be_read_is_refused(
    token_ids: np.ndarray, places: np.ndarray | None, images: tuple[bytes, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await PROMPTS.prompt(token_ids, places, images, None)


async def test_server_of_a_model_of_text_refuses_images() -> None:
    with pytest.raises(ValueError, match="takes no images"):
        await ImagePrompts(Processor(), None).prompt(ids(9), spans((0, 1)), (NARROW,), None)
