"""Loads mathematical problems with reference answers. `NAMED` holds the data sets of PipelineRL's configurations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipelinerl.domains.columns import answer_of, checked_columns, is_filled, question_of
from pipelinerl.domains.datasets import rows_of
from pipelinerl.domains.math.reference import final_answer, judged_reference
from pipelinerl.domains.rows import MAX_LEFT_OUT, UnusableRow, load_usable
from pipelinerl.errors import DatasetError

Row = dict[str, Any]
TESTS = (
    "tests", "test_cases", "unit_tests", "public_tests", "private_tests", "public_test_cases", "private_test_cases",
    "input_output", "starter_code", "fn_name", "entry_point", "canonical_solution",
)  # fmt: skip
"""Columns of published programming problems. A row with one of them is not mathematics."""
ORZ = "https://raw.githubusercontent.com/Open-Reasoner-Zero/Open-Reasoner-Zero/refs/heads/main/data/orz_math_"
SIMPLERL = (
    "https://raw.githubusercontent.com/hkust-nlp/simpleRL-reason/refs/heads/v0/train/data/"
    "math_level3to5_data_processed_with_qwen_prompt.json"
)
EURUS_ENDING = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
COMPETITION_REPEATS = 16
"""PipelineRL evaluates each of a competition's 30 to 43 problems 16 times, and once under `<name>_original`."""


@dataclass(frozen=True, kw_only=True)
class NamedDataset:
    """A data set behind a name."""

    source: str
    """As `pipelinerl.domains.datasets` reads it."""
    read: Callable[[Row], Row] | None = None
    """Row → `{"task", "answer"}`. None: the row has columns of the usual names."""
    keep: Callable[[Row], bool] | None = None
    """Whether to use a row. None: all."""
    repeats: int = 1
    """How often the whole list of problems is repeated."""


def orz(row: Row) -> Row:
    return {"task": row["0"]["value"], "answer": row["1"]["ground_truth"]["value"]}


def eurus(row: Row) -> Row:
    task = row["prompt"][1]["content"].replace(EURUS_ENDING, "")
    return {"task": task, "answer": row["reward_model"]["ground_truth"]}


def is_math(row: Row) -> bool:
    return bool(row["ability"] == "math")


def is_verified(row: Row) -> bool:
    """Whether math-verify agrees with one of the solutions, according to the data set's authors."""
    return any(row.get("correctness_math_verify") or [True])


def of_year(year: int) -> Callable[[Row], bool]:
    return lambda row: str(year) in row["url"]


def competition(name: str, source: str, keep: Callable[[Row], bool] | None = None) -> dict[str, NamedDataset]:
    return {
        name: NamedDataset(source=source, keep=keep, repeats=COMPETITION_REPEATS),
        f"{name}_original": NamedDataset(source=source, keep=keep),
    }


def plain(source: str) -> NamedDataset:
    return NamedDataset(source=source)


NAMED: dict[str, NamedDataset] = {
    "train": plain("agentica-org/DeepScaleR-Preview-Dataset"),
    "test": plain("HuggingFaceH4/MATH-500@test"),
    "math_500": plain("HuggingFaceH4/MATH-500@test"),
    "omni_math_500": plain("reliable-agents/Omni-MATH-500@test"),
    "math_train": plain("hendrycks/competition_math@train"),
    "math_test": plain("hendrycks/competition_math@test"),
    "math_simplerl_train": plain(SIMPLERL),
    "deepscaler": plain("agentica-org/DeepScaleR-Preview-Dataset"),
    "deepscaler_preview": plain("agentica-org/DeepScaleR-Preview-Dataset"),
    "nemotron_cascade_math": plain("nvidia/Nemotron-Cascade-RL-Math"),
    "limo": plain("GAIR/LIMO"),
    "gpqa_main": plain("hendrydong/gpqa_main@test"),
    "gpqa_diamond": plain("hendrydong/gpqa_diamond@test"),
    "gsm8k_train": plain("openai/gsm8k:main@train"),
    "gsm8k_test": plain("openai/gsm8k:main@test"),
    "open_r1_math_220k": NamedDataset(source="open-r1/OpenR1-Math-220k@default", keep=is_verified),
    "open_reasoner_zero_57k": NamedDataset(source=f"{ORZ}57k_collected.json", read=orz),
    "open_reasoner_zero_extended_72k": NamedDataset(source=f"{ORZ}72k_collection_extended.json", read=orz),
    "open_reasoner_zero_hard_13k": NamedDataset(source=f"{ORZ}13k_collection_hard.json", read=orz),
    "eurus_train": NamedDataset(source="PRIME-RL/Eurus-2-RL-Data@train", read=eurus, keep=is_math),
    "eurus_validation": NamedDataset(source="PRIME-RL/Eurus-2-RL-Data@validation", read=eurus, keep=is_math),
    **competition("aime_2025", "MathArena/aime_2025"),
    **{
        name: entry
        for year in (2022, 2023, 2024)
        for name, entry in competition(f"aime_{year}", "AI-MO/aimo-validation-aime", of_year(year)).items()
    },
    **{
        name: entry
        for year in (2022, 2023)
        for name, entry in competition(f"amc_{year}", "AI-MO/aimo-validation-amc", of_year(year)).items()
    },
}
"""`train` and `test` are the project's own names."""


def named_rows(name: str, streaming: bool) -> Iterator[Row]:
    """Yields the rows of a data set that is named here, or of any other that `rows_of` reads.

    Raises:
        DomainError: as `rows_of`, or a row of a named data set lacks a column by which its rows are chosen.
    """
    entry = NAMED.get(name)
    if entry is None:
        yield from rows_of(name, streaming)
        return
    for _ in range(entry.repeats):
        for index, row in enumerate(rows_of(entry.source, streaming)):
            try:
                if entry.keep is None or entry.keep(row):
                    yield row
            except (KeyError, IndexError, TypeError) as error:
                raise DatasetError(
                    f"dataset {name!r} ({entry.source}): row {index} is not as it was published: "
                    f"{type(error).__name__}: {error}, its columns are {sorted(row)}",
                    name,
                ) from error


def load_problems(
    dataset_names: list[str],
    columns: dict[str, str] | None = None,
    max_problems: int | None = None,
    streaming: bool = True,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[dict[str, Any]]:
    """Loads problems ``{"dataset", "task", "answer", "id"}`` of all data sets, in order.

    Args:
        dataset_names: see ``pipelinerl.domains.datasets``, or a name of ``pipelinerl.domains.math.dataset``: `train` is
            DeepScaleR's data set, `test` is MATH-500, `aime_2024` is PipelineRL's data set of that name.
        columns: field → column, e.g. ``{"task": "problem", "answer": "extra_info.answer"}``. By default the first of
            ``pipelinerl.domains.columns`` that exists.
        max_problems: maximum number of rows to read per data set. None: all.
        streaming: read Hugging Face data sets as a stream instead of downloading them.
        max_left_out: largest share of a data set's rows that may be left out because they cannot be judged.

    Raises:
        DomainError: a file does not exist, or more rows than allowed lack their question, or an answer that the judge
            can read.
    """
    problems = []
    columns = checked_columns(columns, ("task", "answer"))
    for name in dataset_names:
        read = partial(judged_problem, columns=columns, dataset=name)
        rows = named_rows(name, streaming)
        problems += load_usable(name, rows, read, max_rows=max_problems, max_left_out=max_left_out)
    return problems


def judged_problem(row: Row, index: int, columns: dict[str, str], dataset: str) -> dict[str, Any]:
    """Converts a row to a problem whose answer the judge can read. Raises ``UnusableRow``."""
    entry = NAMED.get(dataset)
    if entry is not None and entry.read is not None:
        try:
            row = entry.read(row)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UnusableRow(
                "it is not as it was published", f"{type(error).__name__}: {error}, its columns are {sorted(row)}"
            ) from error
    if tests := [name for name in row if name in TESTS and is_filled(row[name])]:
        raise UnusableRow("it is a coding problem", f"it has a column `{tests[0]}`")
    problem = problem_of(row, columns)
    return {"dataset": dataset, **problem, "answer": judged_reference(problem["answer"]), "id": index}


def problem_of(row: Row, columns: dict[str, str]) -> dict[str, Any]:
    """Returns ``task`` and ``answer`` of a row. Raises ``UnusableRow``."""
    task = question_of(row, columns.get("task"))
    return {"task": task, "answer": final_answer(answer_of(row, columns.get("answer")))}
