"""Deterministic checks of an answer's form: length, keywords, format, JSON.

The gold is a list of constraints ``{"check": name, …arguments}``. The score is the share of constraints that hold, and
the answer is correct if all do. Every check takes linear time. No check takes a regular expression from the problem.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from pipelinerl.records.verdicts import Verdict, correct, error, no_answer

MAX_JSON_CHARS = 100_000
WORD = re.compile(r"\b\w+\b")


def words(text: str) -> list[str]:
    return WORD.findall(text)


def sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<![.!?])[.!?]+(?:\s|$)", text) if part.strip()]


def paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


UNITS: dict[str, Callable[[str], Any]] = {
    "characters": str,
    "lines": lines,
    "paragraphs": paragraphs,
    "sentences": sentences,
    "words": words,
}


def length(text: str, unit: str, at_least: int = 0, at_most: int | None = None) -> bool:
    """Whether the number of characters, words, sentences, lines or paragraphs is within bounds (both included)."""
    count = len(UNITS[unit](text.strip()))
    return count >= at_least and (at_most is None or count <= at_most)


def keyword(text: str, word: str, at_least: int = 1, at_most: int | None = None) -> bool:
    """Whether a word or phrase occurs often enough, in any case and not inside other words."""
    count = len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))
    return count >= at_least and (at_most is None or count <= at_most)


def forbidden(text: str, word: str) -> bool:
    return not keyword(text, word)


def starts_with(text: str, prefix: str) -> bool:
    return text.lstrip().startswith(prefix)


def ends_with(text: str, suffix: str) -> bool:
    return text.rstrip().endswith(suffix)


def case(text: str, want: str) -> bool:
    """Whether the whole text is in ``lower`` or ``upper`` case."""
    return text == {"lower": text.lower(), "upper": text.upper()}[want]


def bullets(text: str, at_least: int = 1, at_most: int | None = None) -> bool:
    """Whether the number of lines that begin with ``-`` or ``*`` and a space is within bounds."""
    count = sum(line.lstrip().startswith(("- ", "* ")) for line in text.splitlines())
    return count >= at_least and (at_most is None or count <= at_most)


def quoted(text: str) -> bool:
    """Whether the whole answer is in double quotes."""
    stripped = text.strip()
    return len(stripped) >= 2 and stripped[0] == stripped[-1] == '"'


def no_commas(text: str) -> bool:
    return "," not in text


def without_fence(text: str) -> str:
    """What stands between the two lines of a Markdown fence, which may be marked as JSON. Else the text."""
    first, _, rest = text.strip().partition("\n")
    body, _, last = rest.rpartition("\n")
    return body if first.strip() in ("```", "```json") and last.strip() == "```" else text


def is_json(text: str, type: str | None = None, keys: list[str] | None = None) -> bool:
    """Whether the whole answer is JSON. A Markdown fence around it is allowed.

    Args:
        text: the answer.
        type: "object", "array", or None for any.
        keys: keys that the object must have.
    """
    body = without_fence(text)
    if len(body) > MAX_JSON_CHARS:
        return False
    try:
        value = json.loads(body, parse_int=str, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return False
    expected = {"object": dict, "array": list}.get(type or "", object)
    return isinstance(value, expected) and (keys is None or (isinstance(value, dict) and set(keys) <= set(value)))


def reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


CHECKS: dict[str, Callable[..., bool]] = {
    "bullets": bullets,
    "case": case,
    "ends_with": ends_with,
    "forbidden": forbidden,
    "json": is_json,
    "keyword": keyword,
    "length": length,
    "no_commas": no_commas,
    "quoted": quoted,
    "starts_with": starts_with,
}


def judge(prediction: str, gold: list[dict[str, Any]], options: dict[str, Any]) -> Verdict:
    """Judges a whole output against its constraints.

    Args:
        prediction: the model's output.
        gold: constraints, e.g. ``[{"check": "length", "unit": "words", "at_most": 50}, {"check": "json"}]``.
        options: none.
    """
    if not prediction.strip():
        return no_answer("an empty output")
    if not gold:
        return error("instructions: a problem without constraints")
    failed = []
    for constraint in gold:
        arguments = {name: value for name, value in constraint.items() if name != "check"}
        try:
            holds = CHECKS[constraint["check"]](prediction, **arguments)
        except (KeyError, TypeError) as problem:
            return error(f"instructions: the constraint {constraint} is wrong: {type(problem).__name__} {problem}")
        if not holds:
            failed.append(constraint["check"])
    if not failed:
        return correct()
    return Verdict(status="wrong", score=1 - len(failed) / len(gold), detail=f"failed: {', '.join(failed)}")
