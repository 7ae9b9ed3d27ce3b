"""Limits of the domains: the largest value is taken, the next larger one is not. Expected values are written out."""

import asyncio
from typing import Any

import aiohttp
import pytest

from pipelinerl.async_llm import backoff_s
from pipelinerl.config.sections import JudgeSection
from pipelinerl.domains.coding.judge import TestSuite, same_text
from pipelinerl.domains.coding.judge import judge as judge_program
from pipelinerl.domains.countdown.judge import ExpressionError, evaluate
from pipelinerl.domains.datasets import is_held_out
from pipelinerl.domains.judge_client import JudgeClient
from pipelinerl.domains.judge_prompt import opinion_schema
from pipelinerl.domains.libraries.tools import judge as judge_tool_answer
from pipelinerl.domains.math.answers.parser import parse
from pipelinerl.domains.math.answers.trees import NotParsedError
from pipelinerl.domains.math.judge import judge as judge_math
from pipelinerl.domains.math.judge import part_to_judge
from pipelinerl.domains.math.reference import judged_reference
from pipelinerl.domains.rows import UnusableRow
from pipelinerl.domains.sandbox import Outcome
from pipelinerl.domains.sandbox.fusion import SandboxFusion
from pipelinerl.domains.verifier_client import VerifierClient
from pipelinerl.errors import VerifierError

UNREACHABLE = "http://127.0.0.1:9"


class EndError(Exception):
    """Ends a loop that would go on until its time has passed."""


class Delays(list[float]):
    """Records the delays between requests, and sleeps for none of them. Raises ``EndError`` after ``most``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1000):
        super().__init__()
        self._most = most
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, delay: float) -> None:
        self.append(delay)
        if len(self) == self._most:
            raise EndError


@pytest.mark.parametrize(
    ("largest", "too_large"),
    [
        ("11" + "+1" * 199, "111" + "+1" * 199),  # 400 and 401 characters
        ("(" * 32 + "1" + ")" * 32, "(" * 33 + "1" + ")" * 33),
        ("9" * 9, "9" * 10),
    ],
)
def test_countdown_expression_within_its_limits_is_evaluated(largest: str, too_large: str) -> None:
    assert evaluate(largest).value > 0
    with pytest.raises(ExpressionError):
        evaluate(too_large)


class AlwaysExits:
    """A sandbox in which every program ends without output."""

    async def run_python(self, code: str, stdins: Any) -> list[Outcome]:
        return [Outcome(ended="exited", exit_code=0, seconds=0, stdout="", stderr="") for _ in stdins]


@pytest.mark.parametrize(("length", "status"), [(100_000, "correct"), (100_001, "unparsable")])
async def test_program_of_at_most_100000_characters_is_run(length: int, status: str) -> None:
    program = "#" * (length - 1) + "\n"
    suite = TestSuite.from_problem({"inputs": [""], "outputs": [""]})
    verdict = await judge_program(f"```python\n{program}```\n", suite, AlwaysExits())
    assert verdict.status == status


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1.0000009", "1.0", True),
        ("1.0000015", "1.0", False),
        ("0.0000009", "0.0", True),
        ("0.0000015", "0.0", False),
        ("1000000.9", "1000000.0", True),
        ("1000001.5", "1000000.0", False),
    ],
)
def test_decimals_differ_by_at_most_a_millionth_of_what_exceeds_one(actual: str, expected: str, same: bool) -> None:
    assert same_text(actual, expected) is same


def test_one_generated_problem_in_ten_is_held_out() -> None:
    assert sum(is_held_out(f"problem {index}") for index in range(10_000)) == pytest.approx(1000, abs=100)


@pytest.mark.parametrize(("length", "status"), [(100, "correct"), (101, "no_answer")])
def test_answer_after_tools_has_at_most_100_characters(length: int, status: str) -> None:
    assert judge_tool_answer(f"<answer>{'a' * length}</answer>", "a" * length).status == status


@pytest.mark.parametrize(("length", "status"), [(1000, "correct"), (1001, "unparsable")])
def test_mathematical_answer_has_at_most_1000_characters(length: int, status: str) -> None:
    assert judge_math(f"\\boxed{{{'1' * length}}}", "1" * length, {}).status == status


def test_mathematical_answer_has_at_most_59_nested_brackets() -> None:
    assert parse("(" * 59 + "1" + ")" * 59)
    with pytest.raises(NotParsedError):
        parse("(" * 60 + "1" + ")" * 60)


def test_output_without_a_box_is_searched_in_its_last_4000_characters() -> None:
    assert part_to_judge("a" + "b" * 4000) == "b" * 4000


def test_reference_of_more_than_six_words_is_prose() -> None:
    words = ["red", "green", "blue", "black", "white", "grey", "brown"]
    assert judged_reference(" ".join(words[:6])) == " ".join(words[:6])
    with pytest.raises(UnusableRow, match="prose"):
        judged_reference(" ".join(words))


def test_reason_of_a_judge_has_at_most_400_characters() -> None:
    schema = opinion_schema(5)["json_schema"]["schema"]
    assert schema["properties"]["reason"]["maxLength"] == 400


def test_delay_between_requests_to_a_server_grows_up_to_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    assert [backoff_s(repetition, 0.5) for repetition in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


async def test_verifier_that_does_not_answer_is_asked_ten_times_within_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = Delays(monkeypatch)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(VerifierError, match="10 attempts"):
            await VerifierClient([UNREACHABLE]).check(session, "math", "\\boxed{1}", "1")
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0])


async def test_judge_that_does_not_answer_is_asked_again_with_growing_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = Delays(monkeypatch, most=7)
    judge = JudgeSection(name="helpful", model_path="m", url=UNREACHABLE)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EndError):
            await JudgeClient(judge, [UNREACHABLE], patience_s=3600).check(session, "Q", "A")
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


async def test_sandbox_fusion_that_does_not_answer_is_asked_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = Delays(monkeypatch)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(VerifierError, match="did not run the program"):
            await SandboxFusion(UNREACHABLE, session).run_python("", [""])
    assert delays == [0.5, 1.0, 2.0, 4.0]
