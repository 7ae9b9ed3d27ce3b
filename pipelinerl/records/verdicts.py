"""The records between verifier client, service and workers: a check and its verdict."""

from typing import Any, Literal

import msgspec

VerdictStatus = Literal["correct", "wrong", "no_answer", "unparsable", "error"]


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer to judge."""

    kind: str
    """Name of the judge: `math`, `countdown`, or one of `verifier.judges`."""
    prediction: str
    """The model's whole output, in which the judge finds the answer."""
    gold: Any
    """Reference that the judge compares with. Each judge defines its form."""
    options: dict[str, Any] = {}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judge's result. ``score`` is 1 for correct, between 0 and 1 for partial credit, else 0."""

    status: VerdictStatus
    score: float = 0.0
    detail: str = ""
    """The reason, for people. Never parsed."""
    numbers: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """Of a reward function alone: its `score`, and what else it reports. Empty: it does not apply to the problem."""


class MathAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A mathematical answer to check, in the form that PipelineRL's environment accepts."""

    prediction: str
    gold: str
    strict: bool = True
    max_prediction_length: int = 1000


class CheckBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checks: list[Check]


class BatchVerdicts(msgspec.Struct, frozen=True, kw_only=True):
    verdicts: list[Verdict]


def correct() -> Verdict:
    return Verdict(status="correct", score=1.0)


def wrong(detail: str = "") -> Verdict:
    return Verdict(status="wrong", detail=detail)


def no_answer(detail: str = "") -> Verdict:
    return Verdict(status="no_answer", detail=detail)


def unparsable(detail: str) -> Verdict:
    return Verdict(status="unparsable", detail=detail)


def error(detail: str) -> Verdict:
    return Verdict(status="error", detail=detail)
