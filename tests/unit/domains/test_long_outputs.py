"""What the domains and parsers of a rollout worker do with long outputs takes time in proportion to their length.

Each output is of a kind that a model falls into (blanks, dots, newlines, an opening tag again and again) and cost the
square or the cube of its length: 16,000 blanks took 18 seconds, in the worker's own event loop.
"""

from collections.abc import Callable

import pytest

from examples.instructions.judge import is_json, sentences
from pipelinerl.chat.reading import read_hermes, read_rl_tool
from pipelinerl.countdown_utils import validate_format
from pipelinerl.domains.coding.completions import extract_code
from pipelinerl.domains.countdown.judge import part_to_judge
from pipelinerl.domains.libraries.tools import judge as judge_tool_use
from pipelinerl.domains.math.judge import last_boxed

N = 1_000_000
"""Where the square is hours."""

LONG: dict[str, tuple[Callable[[], object], object]] = {
    "a fence in one long line": (lambda: extract_code("```" + "a" * N + "`"), None),
    "a fence and blanks": (lambda: extract_code("```" + " " * N + "`"), None),
    "blanks in a block": (
        lambda: len(extract_code("  ```\n" + " " * N + "\nprint" + " " * N + "\n  ```") or ""),
        2 * N + 5,
    ),
    "blocks": (lambda: extract_code("```\n\n```\n" * (N // 9)), "\n"),
    "blanks behind a tag": (lambda: judge_tool_use("<answer>" + " " * N, "1").status, "no_answer"),
    "tags that open": (lambda: judge_tool_use("<answer>" * (N // 8), "1").status, "no_answer"),
    "blanks in a list of calls": (lambda: read_rl_tool("<tool_calls>x" + " " * N + "y").calls, []),
    "responses that begin": (lambda: read_rl_tool("[BEGIN FINAL RESPONSE]" * (N // 22)).calls, []),
    "thoughts that begin": (lambda: validate_format("<think>" * (N // 7)), False),
    "dots": (lambda: len(sentences("." * N + "x")), 1),
    "newlines in a fence": (lambda: is_json("```\n" + "\n" * N + "x"), False),
    "digits in a box": (lambda: len(last_boxed("\\boxed{" + "1" * N + "}") or ""), N),
    "answers without an end": (lambda: part_to_judge("<answer>" * (N // 8)), ""),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", LONG)
def test_long_output_is_read_in_time_in_proportion_to_its_length(kind: str) -> None:
    read, expected = LONG[kind]
    assert read() == expected


@pytest.mark.parametrize("read", [read_rl_tool, read_hermes])
@pytest.mark.parametrize("text", ["[" * 100_000, "<tool_call>" + "[" * 100_000, "<tool_calls>" + '{"a":' * 100_000])
def test_call_that_is_nested_deeply_is_no_call(read: Callable, text: str) -> None:
    assert read(text).calls == []


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ('```json\n{"a": 1}\n```', True),
        ("\n ``` \n[1]\n  ```\n", True),
        ("```\n\n\n[1]\n\n```", True),
        ("[1]", True),
        ("```json [1]\n```", False),
        ("```python\n[1]\n```", False),
        ("```\n[1]```", False),
        ("```\n```", False),
    ],
)
def test_json_may_stand_in_a_fence(text: str, holds: bool) -> None:
    assert is_json(text) == holds


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("<answer>1</answer> <answer> 2 </answer>", "correct"),
        ("<answer>a <answer>2</answer>", "correct"),
        ("<answer>2</answer> <answer>3", "correct"),
        ("<answer></answer>", "no_answer"),
        ("<answer>" + "2" * 101 + "</answer>", "no_answer"),
    ],
)
def test_tool_use_judges_the_last_answer_that_is_closed(text: str, status: str) -> None:
    assert judge_tool_use(text, "2").status == status
