"""Turns the rows of a data set into problems. A row that cannot be judged is left out, counted, and reported once.

A loader reads each row with a function that raises `UnusableRow`. If the whole data set lacks a column, all rows are
left out, and the error names the column. Any other `DomainError` ends the loading.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from pipelinerl.errors import DatasetError, DomainError

log = logging.getLogger(__name__)

Row = TypeVar("Row")
Problem = TypeVar("Problem")

MAX_LEFT_OUT = 0.1
"""Default of `dataset_loader_params.max_left_out`. Above a tenth, the columns are probably the wrong ones."""
MAX_USELESS = 1000
"""Reading stops after this many rows if none of them can be used."""


class UnusableRow(DomainError):
    """A row that a judge cannot use.

    Args:
        reason: the same words for all rows of a kind, such as "the answer is missing".
        detail: what this row holds.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(kw_only=True)
class RowReport:
    """Counts the rows of a data set that were kept, and those that were left out, by reason."""

    dataset: str
    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of rows."""
    examples: dict[str, str] = field(default_factory=dict)
    """Reason → "row 7: …", the first row of its kind."""

    @property
    def share_left_out(self) -> float:
        """Share of the rows read that were left out, from 0 to 1. 0 if no row was read."""
        return self.left_out.total() / max(1, self.kept + self.left_out.total())

    def lines(self) -> list[str]:
        """One line for each reason, the most frequent one first."""
        return [f"{count} rows: {reason} ({self.examples[reason]})" for reason, count in self.left_out.most_common()]

    def leave_out(self, index: int, error: UnusableRow) -> None:
        """Counts row ``index``, and keeps it as the example of its reason if it is the first one."""
        self.left_out[error.reason] += 1
        self.examples.setdefault(error.reason, f"row {index}: {error.detail}" if error.detail else f"row {index}")

    def refusal(self, advice: str) -> DatasetError:
        """Returns the error that too many rows are left out. ``advice``: what to do about it."""
        return DatasetError(
            f"dataset {self.dataset!r}: {self.left_out.total()} of {self.kept + self.left_out.total()} rows cannot be "
            f"used: {'; '.join(self.lines())}. {advice}",
            self.dataset,
        )


_collected: ContextVar[list[RowReport] | None] = ContextVar("collected", default=None)


@contextmanager
def collected_reports() -> Iterator[list[RowReport]]:
    """Collects the reports of the data sets that are read inside the block, for `pipelinerl check`."""
    reports: list[RowReport] = []
    token = _collected.set(reports)
    try:
        yield reports
    finally:
        _collected.reset(token)


def usable_problems(
    rows: Iterable[Row], read: Callable[[Row, int], Problem], report: RowReport, max_rows: int | None = None
) -> Iterator[Problem]:
    """Yields the problems of the rows that can be judged, and counts all rows in ``report``.

    Args:
        rows: the rows of one data set.
        read: (row, index in the data set) → a problem. Raises `UnusableRow`.
        report: the report of this data set.
        max_rows: maximum number of rows to read. None: all.
    """
    if (reports := _collected.get()) is not None:
        reports.append(report)
    for index, row in enumerate(islice(rows, max_rows)):
        try:
            problem = read(row, index)
        except UnusableRow as error:
            report.leave_out(index, error)
            if not report.kept and report.left_out.total() >= MAX_USELESS:
                return
        else:
            report.kept += 1
            yield problem


def load_usable(
    dataset: str,
    rows: Iterable[Row],
    read: Callable[[Row, int], Problem],
    *,
    max_rows: int | None = None,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[Problem]:
    """Returns the problems of the rows that can be judged. Logs one line for each reason to leave rows out.

    Args:
        dataset: name of the data set, for messages.
        rows, read, max_rows: as in `usable_problems`.
        max_left_out: largest share of rows that may be left out, from 0 to 1.
    Raises:
        DatasetError: no row can be used, or more rows than allowed are left out.
        DomainError: a limit is out of its range.
    """
    if max_rows is not None and max_rows < 1:
        raise DomainError(f"`dataset_loader_params.max_problems` is {max_rows}: it must be at least 1, or null for all")
    if not 0 <= max_left_out <= 1:
        raise DomainError(f"`dataset_loader_params.max_left_out` is {max_left_out}: it must be a share from 0 to 1")
    report = RowReport(dataset=dataset)
    problems = list(usable_problems(rows, read, report, max_rows))
    for line in report.lines():
        log.warning("event=rows_left_out dataset=%s %s", dataset, line)
    if report.left_out and (not problems or report.share_left_out > max_left_out):
        raise report.refusal(
            f"`pipelinerl check {dataset}` lists them. Set the columns, or allow it with "
            f"dataset_loader_params.max_left_out (now {max_left_out})"
        )
    return problems


def is_unusable(value: Any) -> bool:
    """Whether a cell has no value: None, NaN, or only spaces."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())
