"""Loads mathematical problems with reference answers. The configuration maps the columns."""

import re
from typing import Any

from pipelinerl.domains.datasets import column
from pipelinerl.domains.math.named import named_rows
from pipelinerl.errors import DomainError

GSM8K_ANSWER = re.compile(r"####\s*(.+?)\s*$")


def load_problems(
    dataset_names: list[str],
    columns: dict[str, str] | None = None,
    max_problems: int | None = None,
    streaming: bool = True,
) -> list[dict[str, Any]]:
    """Loads problems ``{"dataset", "task", "answer", "id"}`` of all data sets, in order.

    Args:
        dataset_names: see ``pipelinerl.domains.datasets``, or a name of ``pipelinerl.domains.math.named``: `train` is
            DeepScaleR's data set, `test` is MATH-500, `aime_2024` is what PipelineRL calls so.
        columns: field → column, e.g. ``{"task": "problem", "answer": "solution"}``. By default the first that exists:
            ``task``, ``question`` or ``problem``, and ``answer`` or ``solution``.
        max_problems: maximum per data set. None: all.
        streaming: read Hugging Face data sets as a stream instead of downloading them.

    Raises:
        DomainError: a file or column does not exist, or a row lacks its answer.
    """
    problems = []
    for name in dataset_names:
        for index, row in enumerate(named_rows(name, streaming)):
            if max_problems is not None and index >= max_problems:
                break
            problems.append(problem_of(row, columns or {}, name, index))
    return problems


def problem_of(row: dict[str, Any], columns: dict[str, str], dataset: str, index: int) -> dict[str, Any]:
    """Converts a row to a problem."""
    task = column(row, columns.get("task"), ("task", "question", "problem"), dataset, "task")
    answer = column(row, columns.get("answer"), ("answer", "solution"), dataset, "answer")
    if answer is None or str(answer).strip() == "":
        raise DomainError(f"dataset {dataset!r}: row {index} has no answer")
    return {"dataset": dataset, "task": str(task), "answer": final_answer(str(answer)), "id": index}


def final_answer(answer: str) -> str:
    """Returns the answer at the end of a worked solution (``#### 42``), or the text itself if it has no such end."""
    match = GSM8K_ANSWER.search(answer)
    return match[1].replace(",", "") if match else answer
