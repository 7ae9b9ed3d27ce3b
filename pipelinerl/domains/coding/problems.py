"""Loads coding problems from Hugging Face data sets or local files. A problem consists of a task and its tests."""

import json
from collections.abc import Iterator
from typing import Any

from pipelinerl.domains.coding.judge import TestSuite
from pipelinerl.domains.columns import column, question_of
from pipelinerl.domains.datasets import rows_of
from pipelinerl.errors import DomainError

INTELLECT = "PrimeIntellect/INTELLECT-3-RL:code@train"
NAMED: dict[str, tuple[str, str | None]] = {
    "taco": ("BAAI/TACO:ALL@train", None),
    "taco_test": ("BAAI/TACO:ALL@test", None),
    "intellect3_code": (INTELLECT, None),
    "intellect3_lcbv5": (INTELLECT, "lcbv5"),
}
"""Name → (data set, the `source` in its column `info` that counts)."""
TESTS = ("tests", "input_output", "test_cases", "reward_model.ground_truth", "info")
"""Usual columns of the tests."""


def load_problems(
    dataset_names: list[str],
    columns: dict[str, str] | None = None,
    max_problems: int | None = None,
    max_tests: int | None = None,
    streaming: bool = True,
) -> list[dict[str, Any]]:
    """Loads problems ``{"dataset", "task", "tests", "id"}`` of all data sets, in order.

    Args:
        dataset_names: see ``pipelinerl.domains.datasets``, or a name of ``NAMED``.
        columns: field → column. By default the first of ``pipelinerl.domains.columns`` or ``TESTS`` that exists. The
            tests are
            ``{"inputs": […], "outputs": […], "fn_name": …}``, or that as JSON, or under ``tests`` of such a mapping.
        max_problems: maximum per data set. None: all.
        max_tests: use only the first tests of a problem. None: all.
        streaming: read Hugging Face data sets as a stream.
    Raises:
        DomainError: a column does not exist, or the tests of a row cannot be used.
    """
    problems = []
    for name in dataset_names:
        for index, row in enumerate(named_rows(name, streaming)):
            if max_problems is not None and index >= max_problems:
                break
            problems.append(problem_of(row, columns or {}, name, index, max_tests))
    return problems


def named_rows(name: str, streaming: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of a data set that is named here, or of any other that `rows_of` reads."""
    source, part = NAMED.get(name, (name, None))
    for row in rows_of(source, streaming):
        if part is None or json.loads(row["info"]).get("source") == part:
            yield row


def problem_of(
    row: dict[str, Any], columns: dict[str, str], dataset: str, index: int, max_tests: int | None
) -> dict[str, Any]:
    task = question_of(row, columns.get("task"))
    tests = column(row, columns.get("tests"), TESTS, "tests")
    try:
        tests = mapping_of(tests)
        tests = mapping_of(tests["tests"]) if "tests" in tests else tests
        tests = {**tests, "inputs": tests["inputs"][:max_tests], "outputs": tests["outputs"][:max_tests]}
        TestSuite.from_problem(tests)
    except (ValueError, KeyError, TypeError) as error:
        raise DomainError(f"dataset {dataset!r}: the tests of row {index} cannot be used: {error}") from error
    return {"dataset": dataset, "task": task, "tests": tests, "id": index}


def mapping_of(tests: Any) -> dict[str, Any]:
    """Decodes a mapping that may be JSON text."""
    return dict(json.loads(tests) if isinstance(tests, str) else tests)
