"""Which rows of a data set become problems. A row that cannot be judged is left out, counted, and named once.

A loader reads each row with a function that raises `UnusableRow`. A column that the whole data set lacks leaves out all
rows, and the error names it. Everything else that goes wrong is a `DomainError` and ends the loading.
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
"""Default of `dataset_loader_params.max_left_out`: above a tenth the columns are probably not what the user thinks."""
MAX_USELESS = 1000
"""Reading stops after this many rows if none of them can be used."""


class UnusableRow(DomainError):
    """A row without what a judge needs.

    Args:
        reason: why, in the same words for all rows of a kind, as "the answer is missing".
        detail: what this row holds.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(kw_only=True)
class RowReport:
    """How many rows of a data set were kept, and why the others were left out."""

    dataset: str
    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason → number of rows."""
    examples: dict[str, str] = field(default_factory=dict)
    """Reason → "row 7: …", the first row of its kind."""

    @property
    def share_left_out(self) -> float:
        """Of all rows read, from 0 to 1. 0 if there are none."""
        return self.left_out.total() / max(1, self.kept + self.left_out.total())

    def lines(self) -> list[str]:
        """One line for each reason, the most frequent one first."""
        return [f"{count} rows: {reason} ({self.examples[reason]})" for reason, count in self.left_out.most_common()]

    def leave_out(self, index: int, error: UnusableRow) -> None:
        """Count row ``index``, and keep it as the example of its reason if it is the first one."""
        self.left_out[error.reason] += 1
        self.examples.setdefault(error.reason, f"row {index}: {error.detail}" if error.detail else f"row {index}")

    def refusal(self, advice: str) -> DatasetError:
        """The error that too many rows are left out. ``advice``: what to do about it."""
        return DatasetError(
            f"dataset {self.dataset!r}: {self.left_out.total()} of {self.kept + self.left_out.total()} rows cannot be "
            f"used: {'; '.join(self.lines())}. {advice}",
            self.dataset,
        )


_collected: ContextVar[list[RowReport] | None] = ContextVar("collected", default=None)


@contextmanager
def collected_reports() -> Iterator[list[RowReport]]:
    """Collects the reports of the data sets that are read within, for `pipelinerl check`."""
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
        rows: of one data set.
        read: (row, index in the data set) → a problem. Raises `UnusableRow`.
        report: of this data set.
        max_rows: reads no more rows than this. None: all.
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
    """Returns the problems of the rows that can be judged. Logs the others once for each reason.

    Args:
        dataset: name of the data set, for messages.
        rows: its rows.
        read: as in `usable_problems`.
        max_rows: as in `usable_problems`.
        max_left_out: largest share of rows that may be left out, from 0 to 1.
    Raises:
        DomainError: no row, or more rows than allowed, were left out, or a limit is out of its range.
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
    """Whether a cell has no value: None, NaN, or a text of spaces only."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())
