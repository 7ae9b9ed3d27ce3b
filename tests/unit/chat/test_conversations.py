"""Conversations to imitate have the tokens of a rollout that said the same, with and without earlier turns."""

import numpy as np
import pytest

from pipelinerl.chat import ChatRenderer, ReadText, Turn, answers_of, extend, history_of
from pipelinerl.chat.conversations import AnsweredText, answered_texts, batch_spans
from pipelinerl.errors import DomainError
from pipelinerl.testing import byte_tokenizer
from tests.says import says

ASKED = {"role": "user", "content": "ab"}
SAID = {"role": "assistant", "content": "yes"}
AGAIN = {"role": "user", "content": "c"}
DONE = {"role": "assistant", "content": "no"}
FORGETS = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def spoken(renderer: ChatRenderer, text: AnsweredText) -> list[str]:
    return [renderer.decode(text.token_ids[start:end]) for start, end in text.answers]


def test_two_turns_are_the_tokens_of_a_rollout_that_said_them() -> None:
    renderer = ChatRenderer(byte_tokenizer())
    first = renderer.render([ASKED], None, {})
    sampled = renderer.encode("yes<|im_end|>")
    answers = answers_of("yes", "<|im_end|>", ReadText("yes", []), ())
    turn = Turn(history_of([ASKED]), answers, None, first.token_ids, sampled, "<|im_end|>")
    messages = [ASKED, SAID, AGAIN]
    extended = extend(renderer, [turn], messages, history_of(messages), None, {})
    assert extended is not None
    expected = [*extended[0].token_ids.tolist(), *renderer.encode("no<|im_end|>").tolist()]
    (text,) = answered_texts(renderer, [ASKED, SAID, AGAIN, DONE, {"role": "user", "content": "?"}], None, {})
    assert text.token_ids == expected
    assert spoken(renderer, text) == ["yes<|im_end|>", "no<|im_end|>"]


def test_template_that_forgets_earlier_answers_makes_a_sequence_of_every_turn() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = FORGETS
    renderer = ChatRenderer(tokenizer)
    texts = answered_texts(renderer, [ASKED, SAID, AGAIN, DONE], None, {})
    assert [renderer.decode(text.token_ids) for text in texts] == [
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>",
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nno<|im_end|>",
    ]
    assert [spoken(renderer, text) for text in texts] == [["yes<|im_end|>"], ["no<|im_end|>"]]


def test_template_whose_prompt_is_no_prefix_of_its_answer_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKS
    with pytest.raises(DomainError, match=says("message 1", "think")):
        answered_texts(ChatRenderer(tokenizer), [ASKED, SAID], None, {})


def test_conversation_without_an_answer_has_no_text() -> None:
    assert answered_texts(ChatRenderer(byte_tokenizer()), [ASKED, AGAIN], None, {}) == []


TEXT = AnsweredText(token_ids=list(range(10)), answers=[(3, 5), (7, 9)], messages=[1, 3])


@pytest.mark.parametrize(
    ("prompt_weight", "limit", "spans", "weights"),
    [
        (0.0, 100, [[3, 5], [7, 9]], [1, 1, 1, 1]),
        (0.0, 8, [[3, 5], [7, 8]], [1, 1, 1]),
        (0.0, 3, [], []),
        (0.5, 100, [[1, 10]], [0.5, 0.5, 1, 1, 0.5, 0.5, 1, 1, 0.5]),
    ],
)
def test_spans_cover_tokens_with_a_weight_within_the_limit(
    prompt_weight: float, limit: int, spans: list[list[int]], weights: list[float]
) -> None:
    spans_R2, weights_K = batch_spans(TEXT, prompt_weight, limit)
    assert spans_R2.tolist() == spans
    assert weights_K.tolist() == weights
    assert spans_R2.dtype == np.int32
