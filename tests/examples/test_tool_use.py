import json
import re

import pytest

from examples.tool_use import domain
from examples.tool_use.domain import call_tool, generate_rollout, load_problems
from pipelinerl.domains.libraries.tools import judge
from pipelinerl.domains.sandbox import Outcome
from pipelinerl.llm import FunctionCall, ToolCall
from pipelinerl.testing import run_rollout
from tests.says import says

REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None}
CFG = {"rewards": REWARDS, "environment": {"tools": ["calculator", "python"], "max_turns": 3}}
PROBLEM = {"dataset": "test", "task": "What is 12 * 12?", "answer": "144"}


class Echo:
    """A runner whose programs print their own source."""

    async def run_python(self, code, stdins):
        return [Outcome(ended="exited", exit_code=0, seconds=0.0, stdout=code, stderr="") for _ in stdins]


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(autouse=True)
def echo(monkeypatch):
    monkeypatch.setattr(domain, "runner_of", lambda cfg, session: Echo())


async def test_result_of_a_tool_is_in_the_next_prompt_and_turns_extend_each_other():
    prompts = []

    def say(prompt):
        prompts.append(prompt)
        return call("calculator", {"expression": "12*12"}) if len(prompts) == 1 else "<answer>144</answer>"

    result = await run_rollout(generate_rollout, PROBLEM, say, CFG)
    assert "144" not in prompts[0]
    assert "144" in prompts[1]
    first, second = (text.input_ids for text in result.training_texts)
    assert second[: len(first)] == first
    assert [text.reward for text in result.training_texts] == [1, 1]
    assert (result.metrics.num_turns, result.metrics.num_tool_calls, result.metrics.num_tool_errors) == (2, 1, 0)  # type: ignore[attr-defined]


async def test_turns_are_limited():
    result = await run_rollout(generate_rollout, PROBLEM, lambda _: call("python", {"code": "1"}), CFG)
    assert result.metrics.num_turns == 3  # type: ignore[attr-defined]
    assert result.metrics.no_answer


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("calculator", '{"expression": "2*(3+4)"}', r"\A14\Z"),
        ("calculator", '{"expression": "1/3"}', r"\A1/3\Z"),
        ("calculator", '{"expression": "2**99999"}', says("error")),
        ("calculator", '{"expression": 3}', says("error", "`expression`")),
        ("calculator", "[]", says("error", "`expression`")),
        ("calculator", "{", says("error", "JSON")),
        ("shell", "{}", says("error", "'shell'")),
        ("python", '{"code": "print(1)"}', says("print(1)")),
    ],
)
async def test_tool_answers_in_text_whatever_the_model_asks(name, arguments, expected):
    tool_call = ToolCall(id="1", function=FunctionCall(name=name, arguments=arguments))
    assert re.match(expected, await call_tool(tool_call, Echo()))


@pytest.mark.parametrize(
    ("text", "answer", "status"),
    [
        ("<answer>144</answer>", "144", "correct"),
        ("<answer> 1,440 </answer>", "1440", "correct"),
        ("<answer>0.5</answer>", "1/2", "correct"),
        ("<answer>143</answer>", "144", "wrong"),
        ("<answer>a dozen</answer>", "12", "unparsable"),
        ("<answer>1/0</answer>", "1", "unparsable"),
        ("<answer>Paris</answer>", "paris", "correct"),
        ("144", "144", "no_answer"),
    ],
)
def test_answers_are_compared_as_exact_numbers(text, answer, status):
    assert judge(text, answer).status == status


def test_generated_problems_are_right_and_split():
    train, test = load_problems(["train"], num_train_problems=100), load_problems(["test"])
    assert not {p["task"] for p in train} & {p["task"] for p in test}
    for problem in train[:20]:
        expression = problem["task"].removeprefix("What is ").rstrip("?")
        assert problem["answer"] == str(eval(expression))
