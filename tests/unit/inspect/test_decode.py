"""Tokens as text: pieces add up to the text, characters of several tokens stay whole, templates become messages."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipelinerl.errors import ConfigError
from pipelinerl.inspect.decode import (
    TokenText,
    load_token_text,
    messages_in,
    pieces_of,
    problem_fields,
    sampled_mask,
    show_images,
    text_of,
)
from pipelinerl.records import TrainingSequence
from tests.run_folder import make_tokenizer
from tests.vision import picture


@pytest.fixture(scope="module")
def text() -> TokenText:
    return TokenText(make_tokenizer())


def test_pieces_of_any_text_add_up_to_it(text: TokenText) -> None:
    for original in ("The answer is 30", " é 漢字 🙂 end", "<|im_start|>user\nhi<|im_end|>\n", "", "a\n\n  b"):
        pieces = text.pieces(text.encode(original))
        assert "".join(pieces) == original
        assert len(pieces) == len(text.encode(original))


def test_pieces_character_of_several_tokens_stands_at_its_last(text: TokenText) -> None:
    ids = text.encode("漢")
    assert len(ids) == 3
    assert text.pieces(ids) == ["", "", "漢"]
    assert text.pieces(ids[:2]) == ["", "\ufffd"], "cut inside a character"
    assert text.pieces([*ids[:1], *text.encode("abc")])[0] == "", "broken, and the text behind it is not lost"
    assert "c" in "".join(text.pieces([*ids[:1], *text.encode("abc")]))


def test_pieces_token_that_the_tokenizer_does_not_have_is_named(text: TokenText) -> None:
    assert text.pieces([99_999]) == ["<unknown token 99999>"]
    assert not text.is_known(99_999)


def test_pieces_of_a_tokenizer_that_drops_leading_spaces_keep_them() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -1.0), ("▁is", -0.5), ("b", -1.0)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    text = TokenText(tokenizer)
    assert text.pieces([3, 4]) == [" is", "b"]


def test_conversation_roles_and_sampled_parts_of_chatml() -> None:
    pieces = ["<|im_start|>", "user\n", "hi", "<|im_end|>", "\n", "<|im_start|>", "assistant\n", "yes", "<|im_end|>"]
    sampled = [False] * 7 + [True, True]
    found = messages_in(pieces, sampled)
    assert [(m.role, m.parts) for m in found] == [("user", (("hi", False),)), ("assistant", (("yes<|im_end|>", True),))]


MARKS = {
    "chatml": ("<|im_start|>{role}\n", "<|im_end|>", "\n"),
    "llama": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ""),
    "gemma": ("<start_of_turn>{role}\n", "<end_of_turn>", "\n"),
    "harmony": ("<|start|>{role}<|message|>", "<|end|>", ""),
}


@pytest.mark.parametrize("marks", MARKS)
def test_conversation_sampled_marks_are_text_and_make_no_turn(marks: str) -> None:
    begin, end, between = MARKS[marks]
    user, model = begin.format(role="user"), begin.format(role="model")
    invented = f"yes{end}{between}{user}and then?{end}{between}{model}"
    written = [
        (f"{user}hi{end}{between}{model}", False),
        (f"{invented}{end}", True),
        (f"{between}{user}bye{end}", False),
    ]
    found = messages_in([text for text, _ in written], [flag for _, flag in written])
    assert [(m.role, m.text) for m in found] == [("user", "hi"), ("model", f"{invented}{end}"), ("user", "bye")]
    assert found[1].parts == ((f"{invented}{end}", True),)


def test_conversation_harmony_channel_that_was_sampled_is_text() -> None:
    found = messages_in(["<|start|>assistant", "<|channel|>final<|message|>yo<|return|>"], [False, True])
    assert [(m.role, m.text) for m in found] == [("assistant", "<|channel|>final<|message|>yo<|return|>")]


def test_conversation_prefilled_answer_is_marked_from_where_it_was_sampled() -> None:
    found = messages_in(["<|im_start|>assistant\n", "I ", "think"], [False, False, True])
    assert found[0].parts == (("I ", False), ("think", True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyo",
            "yo",
        ),
        ("<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyo", "yo"),
        ("<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>yo<|return|>", "yo"),
    ],
)
def test_conversation_other_templates(text: str, expected: str) -> None:
    found = messages_in(list(text), [False] * len(text))
    assert [message.text for message in found] == ["hi", expected]
    assert found[0].role == "user"


def test_conversation_without_a_template_is_one_text() -> None:
    (message,) = messages_in(["2+2=", "4"], [False, True])
    assert (message.role, message.parts) == ("", (("2+2=", False), ("4", True)))


def test_sampled_mask_is_what_spans_cover() -> None:
    spans = np.array([[1, 2, 0], [3, 5, 1]], np.int32)
    sequence = TrainingSequence(
        token_ids=np.zeros(6, np.int32), logprobs=np.zeros(3, np.float32), spans=spans, finish_reason="stop"
    )
    assert sampled_mask(sequence).tolist() == [False, True, False, True, True, False]


def test_problem_fields_of_cut_json_are_the_text() -> None:
    assert problem_fields('{"a": 1}') == {"a": 1}
    assert problem_fields('{"a": "long tex') == {"problem": '{"a": "long tex'}
    assert problem_fields("") == {}


@pytest.mark.parametrize(
    "problem", ['{"a": "half \\ud800"}', '{"a": NaN}', '{"a": ' + "[" * 60 + "]" * 60 + "}", "[" * 90_000]
)
def test_problem_that_cannot_be_shown_by_its_fields_is_its_text(problem: str) -> None:
    assert problem_fields(problem) == {"problem": problem}


def test_damaged_tokenizer_of_the_newest_export_gives_way_to_the_models(tmp_path: Path) -> None:
    for folder, content in (("exports/step_8", ""), ("model", make_tokenizer().to_str())):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "tokenizer.json").write_text(content)
    assert load_token_text(tmp_path).text(make_tokenizer().encode("abc").ids) == "abc"
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"no readable tokenizer\.json"):
        load_token_text(tmp_path)


def test_text_at_once_is_the_pieces_joined() -> None:
    text = TokenText(make_tokenizer())
    ids = text.encode("<|im_start|>user\né 漢字 <b>1</b> 🙂<|im_end|>\n the answer")
    assert text.text(ids) == "".join(text.pieces(ids))
    assert text.text([]) == ""


def test_image_is_shown_as_its_size_in_place_of_its_tokens(text: TokenText) -> None:
    ids = text.encode("abcdefgh")
    plain = TrainingSequence(
        token_ids=np.array(ids, np.int32),
        logprobs=np.zeros(0, np.float32),
        spans=np.zeros((0, 3), np.int32),
        finish_reason="stop",
    )
    assert pieces_of(plain, (), text) == text.pieces(ids)
    shown = msgspec.structs.replace(plain, images=np.array([[1, 1, 3]], np.int32))
    pieces = pieces_of(shown, (b"unused", picture(6, 4)), text)
    assert pieces == [text.pieces(ids)[0], "[image 6×4]", "", *text.pieces(ids)[3:]]
    assert text_of(shown, (b"unused", picture(6, 4)), text) == "".join(pieces)
    cut = show_images(["a", "x", "b"], np.array([0, 2, 7]), shown, (b"unused", b"no image"))
    assert cut == ["a", "[image that cannot be decoded]", "b"]


@pytest.mark.parametrize(("depth", "is_shown"), [(49, True), (51, False)])
def test_problem_of_more_than_fifty_levels_is_its_text(depth: int, is_shown: bool) -> None:
    problem = '{"a": ' + "[" * depth + "]" * depth + "}"
    assert (list(problem_fields(problem)) == ["a"]) is is_shown
