"""Regions of the real line, as spans between cuts."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mpmath

from pipelinerl.domains.math.answers.trees import Refusal

Cut = tuple[Any, bool]
"""A place on the line: in front of a number (False) or behind it (True). Cuts are ordered as they lie."""
Span = tuple[Cut, Cut]
"""``[1, 2)`` begins in front of 1 and ends in front of 2."""
LOWEST, HIGHEST = (-mpmath.inf, True), (mpmath.inf, False)


@dataclass(frozen=True)
class Region:
    spans: tuple[Span, ...]
    variable: str | None = None


def half_lines(relation: str, bound: Any) -> tuple[Span, ...]:
    """Where a number is ``< <= > >= !=`` the bound."""
    below, above = (LOWEST, (bound, relation == "<=")), ((bound, relation != ">="), HIGHEST)
    return {"<": (below,), ">": (above,), "!": (below, above)}[relation[0]]


def normalised(spans: Iterable[Span], variable: str | None = None) -> Region:
    """Sorts spans, and joins those that overlap or meet. (a, b) ∪ (b, c) stays two: b lies between them."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return Region(tuple(joined), variable)


def union(left: Region, right: Region) -> Region:
    return normalised((*left.spans, *right.spans), _variable(left, right))


def complement(region: Region) -> Region:
    spans: list[Span] = []
    last: Cut = LOWEST
    for start, end in (*normalised(region.spans).spans, (HIGHEST, HIGHEST)):
        if last < start:
            spans.append((last, start))
        last = end
    return Region(tuple(spans), region.variable)


def intersection(left: Region, right: Region) -> Region:
    joined = complement(union(complement(left), complement(right)))
    return dataclasses.replace(joined, variable=_variable(left, right))


def _variable(left: Region, right: Region) -> str | None:
    if left.variable and right.variable and left.variable != right.variable:
        raise Refusal("inequalities of two variables")
    return left.variable or right.variable
