r"""Which texts are references of mathematics, and that a row without one is left out instead of trained."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from examples.judged.domain import load_problems as load_judged
from examples.tool_use.domain import load_problems as load_tool_use
from pipelinerl.domains.math import load_problems
from pipelinerl.domains.math.judge import judge
from pipelinerl.domains.math.reference import final_answer, judged_reference
from pipelinerl.domains.rows import UnusableRow
from pipelinerl.errors import DomainError

TABLES = Path(__file__).with_name("math_answers")


def published_references() -> Iterator[str]:
    for table in sorted(TABLES.glob("*honest.txt")):
        for line in table.read_text(encoding="utf-8").splitlines():
            if " <- " in line and not line.startswith("#"):
                yield line.split(" <- ")[0].strip()


def test_every_reference_of_the_judges_tables_is_kept() -> None:
    references = list(dict.fromkeys(published_references()))
    assert len(references) > 700
    for reference in references:
        judged_reference(final_answer(reference))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", "42"),
        ("$42$.", "42"),
        (r"\(\frac{1}{2}\)", r"\frac{1}{2}"),
        ("$x=1$ and $y=2$", "x=1 and y=2"),
        (r"So $\boxed{42}$.", "42"),
        (r"So \fbox{42}.", "42"),
        (r"\boxed{\fbox{7}}", "7"),
        (r"We get \boxed{42}. Check: \boxed{42}.", "42"),
        (r"<think>Is it \boxed{41}?</think>It is \boxed{42}.", "42"),
        ("1000 + 234\n#### 1,234", "1234"),
        ("Two of them.\n#### 2, 3", "2, 3"),
        (r"\text{No solution}", r"\text{No solution}"),
        (r"\text{(B) } 3", r"\text{(B) } 3"),
        ("0.3636...", "0.3636..."),
        ("3 + 2 i", "3 + 2 i"),
        (r"-\infty", r"-\infty"),
    ],
)
def test_reference_of_an_answer_or_a_solution(text: str, expected: str) -> None:
    assert judged_reference(final_answer(text)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("proof", "placeholder"),
        (r"\text{Proof.}", "placeholder"),
        ("NaN", "placeholder"),
        ("N/A", "placeholder"),
        ("notfound", "placeholder"),
        ("not found", "placeholder"),
        ("see solution", "placeholder"),
        ("#### None", "placeholder"),
        (r"\boxed{null}", "placeholder"),
        ("-", "placeholder"),
        (r"$\boxed{2}$ or $\boxed{3}$", "boxes that differ"),
        (r"First \boxed{6}, so \fbox{42}", "boxes that differ"),
        (r"\boxed{}", "empty or not closed"),
        (r"so \boxed{\frac{1}{2}", "empty or not closed"),
        ("Multiply 6 and 7 and then subtract nothing at all.", "prose"),
        ("The answer is $42$.", "prose"),
        (r"Since $6 \cdot 7 = 42$ and $x = 1$, the claim follows.", "prose"),
        ("2024-01-31", "a date"),
        ("12/25/2024", "a date"),
        ("0x1F", "as programs write it"),
        ("def f(x):\n    return x", "program"),
        ("print(42)", "program"),
        ('{"inputs": ["1"], "outputs": ["2"]}', "cannot read"),
        ('["42"]', "cannot read"),
        (r"\frac{1}{2", "cannot read"),
        ("}", "cannot read"),
        ("x" * 1001, "longer than the judge reads"),
        ("9" * 1001, "longer than the judge reads"),
    ],
)
def test_text_that_is_no_value_is_no_reference(text: str, reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        judged_reference(final_answer(text))


@pytest.mark.parametrize("gold", [None, math.nan, " "])
def test_missing_reference_never_rewards(gold: Any) -> None:
    for answer in (r"\boxed{NaN}", r"\boxed{nan}", r"\boxed{None}", r"\boxed{}", ""):
        assert judge(answer, gold, {}).status == "error"


def good_rows(count: int) -> list[dict[str, Any]]:
    return [{"problem": f"{index} + 1?", "answer": float(index + 1)} for index in range(count)]


def test_missing_answers_of_a_table_are_left_out_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*good_rows(38), {"problem": "?", "answer": math.nan}, {"problem": "??", "answer": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    problems = load_problems([f"{tmp_path}/rows.parquet"])
    assert [problem["id"] for problem in problems] == list(range(38))
    assert problems[0]["answer"] == "1.0"
    (line,) = [record.getMessage() for record in caplog.records if "rows_left_out" in record.getMessage()]
    assert "2 rows: the answer is missing (row 38: column `answer` is float nan)" in line


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"problem": "Prove it.", "answer": "proof"}, "placeholder"),
        ({"problem": "Add two numbers.", "answer": "3", "starter_code": "def add(a, b):"}, "a coding problem"),
        ({"problem": "How tall?", "answer": "3", "images": ["a.png"]}, "has images"),
        ({"problem": "?"}, "no column for `answer`"),
        ({"problem": None, "answer": "3"}, "the question is missing"),
    ],
)
def test_share_of_rows_left_out_is_bounded_by_one_key(tmp_path: Path, bad: dict[str, Any], reason: str) -> None:
    name = written(tmp_path, [*good_rows(9), bad])
    assert len(load_problems([name])) == 9
    name = written(tmp_path, [*good_rows(8), bad, bad])
    with pytest.raises(DomainError, match=f"2 of 10 rows cannot be used: 2 rows: .*{reason}"):
        load_problems([name])
    assert len(load_problems([name], max_left_out=0.2)) == 8


def test_column_that_no_row_has_is_named_without_reading_a_large_set_to_its_end(tmp_path: Path) -> None:
    name = written(tmp_path, [{"problem": "?", "result": "1"}] * 1100)
    with pytest.raises(DomainError, match=r"1000 of 1000 rows.*'result'\].*set dataset_loader_params\.columns\.answer"):
        load_problems([name], max_left_out=1.0)


def test_other_domains_leave_rows_out_as_well(tmp_path: Path) -> None:
    name = written(tmp_path, [*good_rows(9), {"problem": "Prove it.", "answer": "proof"}])
    assert [problem["id"] for problem in load_tool_use([name])] == list(range(9))
    name = written(tmp_path, [*good_rows(9), {"problem": "", "answer": "3"}])
    assert len(load_judged([name])) == 9
    name = written(tmp_path, [{"problem": "Write a poem.", "answer": math.nan}])
    assert load_judged([name])[0]["answer"] == "", "a question without a reference"
