"""Coding problems from data sets or local files, and their rollout: one answer, which is a program."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.coding.judge import TestSuite, judge
from pipelinerl.domains.coding.published import usable_tests
from pipelinerl.domains.columns import QUESTIONS as USUAL_QUESTIONS
from pipelinerl.domains.columns import checked_columns, inside, question_of
from pipelinerl.domains.datasets import rows_of
from pipelinerl.domains.rows import MAX_LEFT_OUT, load_usable
from pipelinerl.domains.sandbox.choice import runner_of
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict
from pipelinerl.rollouts import RolloutResult

INTELLECT = "PrimeIntellect/INTELLECT-3-RL:code@train"
NAMED: dict[str, tuple[str, str | None]] = {
    "taco": ("BAAI/TACO:ALL@train", None),
    "taco_test": ("BAAI/TACO:ALL@test", None),
    "intellect3_code": (INTELLECT, None),
    "intellect3_lcbv5": (INTELLECT, "lcbv5"),
}
"""Name → (data set, the `source` in its column `info` to keep; None: all rows)."""
QUESTIONS = (*USUAL_QUESTIONS, "question_content", "text", "description")
"""Usual columns of the task. The last three are LiveCodeBench's, MBPP's and CodeContests'."""


def load_problems(
    dataset_names: list[str],
    columns: dict[str, str] | None = None,
    max_problems: int | None = None,
    max_tests: int | None = None,
    streaming: bool = True,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[dict[str, Any]]:
    """Loads problems ``{"dataset", "task", "tests", "id"}`` of all data sets, in order.

    Args:
        dataset_names: see ``pipelinerl.domains.datasets``, or a name of ``NAMED``.
        columns: field → column. By default the first of `QUESTIONS`, and the tests that `published.usable_tests` finds.
        max_problems: maximum number of rows to read per data set. None: all.
        max_tests: maximum number of tests per problem, the first ones. None: all.
        streaming: read Hugging Face data sets as a stream instead of downloading them.
        max_left_out: largest share of a data set's rows that may be left out because they cannot be judged.
    Raises:
        DomainError: ``columns`` has another field, ``max_tests`` is less than 1, or too many rows cannot be judged.
    """
    columns = checked_columns(columns, ("task", "tests"))
    if max_tests is not None and max_tests < 1:
        raise DomainError(f"`dataset_loader_params.max_tests` is {max_tests}: it must be at least 1, or null for all")
    problems: list[dict[str, Any]] = []
    for name in dataset_names:
        problems += load_usable(
            name,
            named_rows(name, streaming),
            partial(problem_of, dataset=name, columns=columns, max_tests=max_tests),
            max_rows=max_problems,
            max_left_out=max_left_out,
        )
    return problems


def named_rows(name: str, streaming: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of a data set that is named here, or of any other that `rows_of` reads."""
    source, part = NAMED.get(name, (name, None))
    for row in rows_of(source, streaming):
        if part is None or inside(row, "info.source") == part:
            yield row


def problem_of(
    row: dict[str, Any], index: int, *, dataset: str, columns: dict[str, str], max_tests: int | None
) -> dict[str, Any]:
    """Reads one row.

    Raises:
        UnusableRow: the row has no task, or no tests that can be run.
    """
    task = question_of(row, columns.get("task"), QUESTIONS)
    tests = usable_tests(row, columns.get("tests"), max_tests)
    if isinstance(task, str):
        task += interface(tests, row.get("starter_code"))
    return {"dataset": dataset, "task": task, "tests": tests, "id": index}


def interface(tests: dict[str, Any], starter_code: Any) -> str:
    """Returns the text that shows the function's arguments: the row's starter code, or the first assertion."""
    if isinstance(starter_code, str) and starter_code.strip():
        return f"\n\nBegin with this code:\n```python\n{starter_code.rstrip()}\n```"
    return f"\n\nThis must hold: `{tests['asserts'][0]}`" if "asserts" in tests else ""


required_problem_keys = ("task", "tests")

STDIN_PROMPT = "Write a Python program that reads standard input and writes standard output."
FUNCTION_PROMPT = "Write a Python function named `{name}`."
FORMAT_PROMPT = "Think first, then give the whole program in one ```python block."


def instructions(tests: dict[str, Any]) -> str:
    name = tests.get("fn_name")
    return f"{FUNCTION_PROMPT.format(name=name) if name else STDIN_PROMPT} {FORMAT_PROMPT}"


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs one rollout. With ``cfg.environment.partial_credit`` (default false), passed tests earn partial credit."""
    partial_credit = (cfg.get("environment") or {}).get("partial_credit", False)

    async def judge_program(output: str) -> Verdict:
        verdict = await judge(output, TestSuite.from_problem(problem["tests"]), runner_of(cfg, session))
        all_or_nothing = verdict.status == "wrong" and not partial_credit
        return Verdict(status="wrong", detail=verdict.detail) if all_or_nothing else verdict

    return await ask_and_judge(
        cfg,
        llm,
        problem,
        session,
        task=problem["task"],
        judge=judge_program,
        system_prompt=instructions(problem["tests"]),
    )
