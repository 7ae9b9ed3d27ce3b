"""Mathematical problems with reference answers, columns mapped by the configuration."""

import re
from typing import Any

from pipelinerl.domains.datasets import column, rows_of
from pipelinerl.errors import DomainError

USUAL = {"train": "agentica-org/DeepScaleR-Preview-Dataset", "test": "HuggingFaceH4/MATH-500@test"}
"""What the names `train` and `test` stand for."""
GSM8K_ANSWER = re.compile(r"####\s*(.+?)\s*$")


def load_problems(
    dataset_names: list[str],
    columns: dict[str, str] | None = None,
    max_problems: int | None = None,
    streaming: bool = True,
) -> list[dict[str, Any]]:
    """Problems ``{"dataset", "task", "answer", "id"}`` of all datasets, in order.

    Args:
        dataset_names: see ``pipelinerl.domains.datasets``; `train` is DeepScaleR's data set, `test` is MATH-500.
        columns: which column holds what: ``{"task": "problem", "answer": "solution"}``; default ``task`` and ``answer``
            or, where these do not exist, ``question``/``problem`` and ``answer``/``solution``.
        max_problems: of each dataset; None = all.
        streaming: Hugging Face datasets are read as a stream instead of being downloaded whole.

    Raises:
        DomainError: a file or column does not exist, or a row lacks its answer.
    """
    problems = []
    for name in dataset_names:
        for index, row in enumerate(rows_of(USUAL.get(name, name), streaming)):
            if max_problems is not None and index >= max_problems:
                break
            problems.append(problem_of(row, columns or {}, name, index))
    return problems


def problem_of(row: dict[str, Any], columns: dict[str, str], dataset: str, index: int) -> dict[str, Any]:
    """One row as a problem."""
    task = column(row, columns.get("task"), ("task", "question", "problem"), dataset, "task")
    answer = column(row, columns.get("answer"), ("answer", "solution"), dataset, "answer")
    if answer is None or str(answer).strip() == "":
        raise DomainError(f"dataset {dataset!r}: row {index} has no answer")
    return {"dataset": dataset, "task": str(task), "answer": final_answer(str(answer)), "id": index}


def final_answer(answer: str) -> str:
    """The answer at the end of a worked solution (``#### 42``); anything else as it is."""
    match = GSM8K_ANSWER.search(answer)
    return match[1].replace(",", "") if match else answer
