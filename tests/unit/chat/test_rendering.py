"""Text and images of messages become tokens, and what is neither is refused."""

from pathlib import Path

import numpy as np
import pytest

from pipelinerl.chat import ReadText, Turn, answers_of, extend, history_of
from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.errors import DomainError
from pipelinerl.testing import byte_tokenizer
from tests.says import says
from tests.vision import tokenizer_with_images


class Picture:
    """No JSON value, as PIL's images."""


def render(part: object) -> str:
    return ChatRenderer(byte_tokenizer()).render([{"role": "user", "content": [part]}], None, {}).text


def test_parts_of_text_are_rendered() -> None:
    assert "user\nseen<" in render({"type": "text", "text": "seen"})


def test_prompt_is_whole_after_the_tokenizer_cut_and_filled_a_text() -> None:
    tokenizer = byte_tokenizer()
    whole = ChatRenderer(tokenizer).encode("a longer text")
    tokenizer.pad_token = tokenizer.eos_token
    assert len(tokenizer("a longer text", truncation=True, max_length=3).input_ids) == 3
    assert ChatRenderer(tokenizer).encode("a longer text").tolist() == whole.tolist()
    assert len(tokenizer("a", padding="max_length", max_length=9).input_ids) == 9
    assert len(ChatRenderer(tokenizer).encode("a")) == 1


def test_newest_256_prompts_are_kept() -> None:
    renderer = ChatRenderer(byte_tokenizer())
    asked = [[{"role": "user", "content": str(number)}] for number in range(257)]
    rendered = [renderer.render(messages, None, {}) for messages in asked]
    assert renderer.render(asked[1], None, {}) is rendered[1]
    assert renderer.render(asked[0], None, {}) is not rendered[0]


IMAGE = {"type": "image", "image": b"first"}
OTHER = {"type": "image_url", "image_url": {"url": "data:image/png;base64,c2Vjb25k"}}


def with_placeholder(folder: Path) -> ChatRenderer:
    """A renderer of a model whose images stand at one token."""
    return ChatRenderer(tokenizer_with_images(folder))


def test_newest_prompts_of_32_mebibytes_are_kept(tmp_path: Path) -> None:
    """An image counts twice: in the prompt, and in the key under which it is kept."""
    renderer = with_placeholder(tmp_path)
    images = [bytes([number]) * (7 * 2**20) for number in range(3)]
    asked = [[{"role": "user", "content": [{"type": "image", "image": image}]}] for image in images]
    rendered = [renderer.render(messages, None, {}) for messages in asked]
    assert renderer.render(asked[1], None, {}) is rendered[1]
    assert renderer.render(asked[0], None, {}) is not rendered[0]


def test_images_are_found_with_the_tokens_that_stand_for_them(tmp_path: Path) -> None:
    renderer = with_placeholder(tmp_path)
    content = [IMAGE, {"type": "text", "text": "ab"}, OTHER]
    rendered = renderer.render([{"role": "user", "content": content}], None, {})
    assert rendered.text.startswith("<|im_start|>user\n<image>ab<image><|im_end|>")
    assert rendered.images == (b"first", b"second")
    # one token of the mark, five of "user\n", then the image, two of "ab" and the other image
    assert rendered.image_spans.tolist() == [[6, 7], [9, 10]]


def test_placeholder_in_a_text_is_refused_beside_an_image(tmp_path: Path) -> None:
    renderer = with_placeholder(tmp_path)
    content = [{"type": "text", "text": "<image>"}, IMAGE]
    with pytest.raises(DomainError, match=says(1, 2, "token")):
        renderer.render([{"role": "user", "content": content}], None, {})


def test_later_turn_keeps_the_tokens_of_its_images_and_finds_the_new_ones(tmp_path: Path) -> None:
    """The model has sampled the placeholder, which is no image."""
    renderer = with_placeholder(tmp_path)
    asked = [{"role": "user", "content": [IMAGE]}]
    first = renderer.render(asked, None, {})
    expanded = np.concatenate((first.token_ids[:6], [7, first.token_ids[6], 7], first.token_ids[7:])).astype(np.int32)
    sampled = renderer.encode("<image>y<|im_end|>")
    turn = Turn(
        history_of(asked), answers_of("<image>y", "<|im_end|>", ReadText("<image>y", []), ()), None, expanded, sampled,
        "<|im_end|>", image_spans=np.array([[6, 9]], dtype=np.int32),
    )  # fmt: skip
    messages = [*asked, {"role": "assistant", "content": "<image>y"}, {"role": "user", "content": [OTHER]}]
    extended = extend(renderer, [turn], messages, history_of(messages), None, {})
    assert extended is not None
    rendered, continued = extended
    assert continued is turn
    before = len(expanded) + len(sampled)
    np.testing.assert_array_equal(rendered.token_ids[:before], [*expanded, *sampled])
    # "\n" ends the answer, one token of the mark, five of "user\n", then the new image
    assert rendered.image_spans.tolist() == [[6, 9], [before + 7, before + 8]]
    assert rendered.images == (b"first", b"second")


@pytest.mark.parametrize("part", [IMAGE, OTHER])
def test_image_for_a_model_of_text_is_refused(part: dict) -> None:
    with pytest.raises(DomainError, match=says("`image_token_id`", "config.json", "model")):
        render(part)


def test_other_values_are_refused_as_they_are() -> None:
    with pytest.raises(DomainError, match=says("'audio'", "text", "images")):
        render({"type": "audio"})
    with pytest.raises(DomainError, match="plain JSON values"):
        render({"type": "text", "text": "x", "more": Picture()})
