"""Loads coding problems from Hugging Face data sets or local files. A problem consists of a task and its tests."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from pipelinerl.domains.coding.published import usable_tests
from pipelinerl.domains.columns import QUESTIONS as USUAL_QUESTIONS
from pipelinerl.domains.columns import checked_columns, inside, question_of
from pipelinerl.domains.datasets import rows_of
from pipelinerl.domains.rows import MAX_LEFT_OUT, load_usable
from pipelinerl.errors import DomainError

INTELLECT = "PrimeIntellect/INTELLECT-3-RL:code@train"
NAMED: dict[str, tuple[str, str | None]] = {
    "taco": ("BAAI/TACO:ALL@train", None),
    "taco_test": ("BAAI/TACO:ALL@test", None),
    "intellect3_code": (INTELLECT, None),
    "intellect3_lcbv5": (INTELLECT, "lcbv5"),
}
"""Name → (data set, the `source` in its column `info` that counts)."""
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
        columns: field → column. By default the first of `QUESTIONS`, and what `published.usable_tests` looks for.
        max_problems: maximum of rows that are read per data set. None: all.
        max_tests: use only the first tests of a problem. None: all.
        streaming: read Hugging Face data sets as a stream.
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
    """Returns what a task says of the function's arguments: the row's starter code, or the first assertion."""
    if isinstance(starter_code, str) and starter_code.strip():
        return f"\n\nBegin with this code:\n```python\n{starter_code.rstrip()}\n```"
    return f"\n\nThis must hold: `{tests['asserts'][0]}`" if "asserts" in tests else ""
