"""Rows that cannot be judged are left out, counted, named once, and too many of them are an error."""

import math

import pytest

from pipelinerl.domains.rows import RowReport, UnusableRow, is_unusable, load_usable, usable_problems
from pipelinerl.errors import DomainError


def read(row: float | str | None, index: int) -> str:
    if is_unusable(row):
        raise UnusableRow("the answer is missing", repr(row))
    if row == "proof":
        raise UnusableRow("the answer is a proof")
    return f"{index}={row}"


def test_usable_problems_counts_every_row_and_keeps_the_first_example_of_each_reason() -> None:
    report = RowReport(dataset="sums")
    found = list(usable_problems(["1", None, "proof", "2", math.nan, "3"], read, report, max_rows=5))
    assert found == ["0=1", "3=2"]  # row 5 is beyond the limit
    assert report.kept == 2
    assert report.share_left_out == pytest.approx(3 / 5)
    assert report.lines() == ["2 rows: the answer is missing (row 1: None)", "1 rows: the answer is a proof (row 2)"]


@pytest.mark.parametrize(("num_bad", "is_refused"), [(1, False), (2, True)])
def test_more_than_a_tenth_left_out_is_an_error(num_bad: int, is_refused: bool) -> None:
    rows = ["1"] * (10 - num_bad) + [""] * num_bad
    if is_refused:
        with pytest.raises(DomainError, match=r"2 of 10 rows cannot be used: .*max_left_out \(now 0.1\)"):
            load_usable("sums", rows, read)
        assert len(load_usable("sums", rows, read, max_left_out=0.2)) == 8
    else:
        assert len(load_usable("sums", rows, read)) == 9


def test_reading_ends_after_a_thousand_rows_of_which_none_is_usable() -> None:
    report = RowReport(dataset="sums")
    assert not list(usable_problems([None] * 3000, read, report))
    assert report.left_out.total() == 1000


def test_no_usable_row_is_an_error_whatever_is_allowed() -> None:
    with pytest.raises(DomainError, match="1 of 1 rows"):
        load_usable("sums", [None], read, max_left_out=1.0)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, True), (math.nan, True), ("  ", True), (0, False), ("0", False)]
)
def test_is_unusable_knows_missing_values(value: object, expected: bool) -> None:
    assert is_unusable(value) is expected
