"""The recipe of an agent with a calculator: what it computes, what is counted, what its template shows."""

import re
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from examples.tools.agent import calculate, call_calculator
from examples.tools.tools import (
    STORIES,
    conversations,
    draw_story,
    generate_rollout,
    joined,
    load_problems,
)
from pipelinerl.chat.conversations import answered_texts
from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.testing import byte_tokenizer, run_rollout
from tests.says import says

TEMPLATE = (Path(__file__).parents[2] / "examples/tools/chat_template.jinja").read_text()
PROBLEM = {"dataset": "test", "question": "Ada has 120 eggs and buys 130 boxes with 140 in each.", "answer": 18320}


def call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"expression": " 120 + 130 * 140 "}', r"\A18320\Z"),
        ('{"expression": "120 - 130"}', r"\A-10\Z"),
        ('{"expression": "2 ** 9"}', says("error")),
        ('{"expression": "True + 1"}', says("error")),
        ('{"expression": "__import__(\'os\')"}', says("error")),
        ('{"expression": "1 +"}', says("error", "no expression")),
        ('{"expression": "%s"}' % ("1+" * 60 + "1"), says("error", "100")),
        ('{"expression": 3}', says("error")),
        ("[]", says("error")),
        ("{", says("error")),
    ],
)
def test_calculator_answers_in_text_whatever_is_asked(arguments: str, expected: str) -> None:
    assert re.match(expected, call_calculator(arguments))


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ((call("120 + 130 * 140"), "The answer is 18320."), (1.0, True, 1, 1.0, False)),
        ((call("120 + 130 * 140"), "The answer is 18329."), (0.0, False, 1, 1.0, False)),
        ((call("120 * 130"), call("120 + 130"), "The answer is 250."), (0.0, False, 2, 0.0, False)),
        (("The answer is 18320.",), (1.0, True, 0, 0.0, False)),
        ((call("1"), call("2"), call("3"), call("4")), (0.0, False, 4, 0.0, True)),
    ],
)
async def test_calls_and_answers_are_counted_apart(replies: tuple[str, ...], expected: tuple) -> None:
    result = await run_rollout(generate_rollout, PROBLEM, replies, chat_template_kwargs={"chat_template": TEMPLATE})
    seen = result.metrics
    assert (seen.reward, seen.success, seen.calls, seen.right_call, seen.no_answer) == expected  # type: ignore[attr-defined]
    turns = [text.input_ids for text in result.training_texts]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(turns))


def test_story_has_its_numbers_in_the_order_of_the_expression() -> None:
    for seed in range(200):
        question, numbers, operators = draw_story(Random(seed))
        assert [int(number) for number in re.findall(r"\d+", question)] == numbers
        assert all(100 <= number <= 999 for number in numbers)
        assert calculate(joined(numbers, operators)) >= 0


def test_imitated_calls_show_the_form_and_not_the_operators() -> None:
    """By chance an operator is right in 1 of 3, two of them in 1 of 9. Three deviations of 400 rows are .06."""
    held_out = {problem["question"] for problem in load_problems(["test"])}
    rows, right = list(conversations(400, seed=0)), 0
    patterns = [(re.sub(r"\\{\w*\\}", r"\\w+", re.escape(text)), operators) for text, operators in STORIES]
    for row in rows:
        asked, called, *_ = row["messages"]
        assert asked["content"] not in held_out
        shown = "".join(re.findall(r"[+*-]", called["tool_calls"][0]["function"]["arguments"]))
        (wanted,) = [operators for pattern, operators in patterns if re.match(pattern, asked["content"])]
        right += shown == wanted
    chance = sum(3.0 ** -len(operators) for _, operators in STORIES) / len(STORIES)
    assert chance == pytest.approx(2 / 9)
    assert right / len(rows) == pytest.approx(chance, abs=0.06)


def test_template_shows_the_tool_its_call_and_its_result_in_one_sequence() -> None:
    (row,) = conversations(1, seed=0)
    renderer = ChatRenderer(byte_tokenizer(TEMPLATE))
    (text,) = answered_texts(renderer, row["messages"], row["tools"], {})
    called, answered = (renderer.decode(text.token_ids[start:end]) for start, end in text.answers)
    assert '{"name": "calculator", "description": ' in text.text
    assert re.fullmatch(re.escape(call("@")).replace("@", r"[\d +*-]+") + r"<\|im_end\|>", called)
    assert answered == row["messages"][-1]["content"] + "<|im_end|>"
