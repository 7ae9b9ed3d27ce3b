"""Judges mathematical answers with math-verify, which finds, parses and compares them.

A check may run forever or take all memory (``10^{10^{10}}``). Call it only in a process with limits, as the verifier
does. math-verify's own alarm-based timeouts are off, because the worker's limits replace them.
"""

import functools
import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipelinerl.domains.math.single_value import number_objection, objection
from pipelinerl.records.verdicts import Verdict, correct, error, no_answer, unparsable, wrong

logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARS = 1000
MAX_TEXT_CHARS = 4000
"""If an output has no box, its last characters, up to this many, are searched for an answer."""
NUMBER = re.compile(
    r"(?P<sign>-?)(?:(?P<decimal>[0-9]{1,12}(?:\.[0-9]{1,12})?)"
    r"|\\[dt]?frac\{(?P<top>[0-9]{1,9})\}\{(?P<bottom>[0-9]{1,9})\}|(?P<over>[0-9]{1,9})/(?P<under>[0-9]{1,9}))",
    re.ASCII,
)
GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?: |~|\\[,;: ])[0-9]{3})+(?![0-9])")
"""Numbers with spaces between thousands. math-verify would read only the last group."""
CLEARLY_DIFFERENT = Fraction(1, 1000)
"""Numbers closer than this are left to math-verify, which rounds to six digits."""
LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\[|\\\(")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How strictly an answer is judged (see ``judge``)."""

    strict: bool
    operators: bool


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{…}`` with balanced braces. None if there is none or it is cut."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    opening = start + len("\\boxed")
    if text[opening : opening + 1] != "{":
        match = re.match(r"\s*([^\s{}$]+)", text[opening:])
        return match[1] if match else None
    depth = 0
    for position in range(opening, len(text)):
        escaped = text[position - 1] == "\\" and text[position - 2] != "\\"
        if escaped:
            continue
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[opening + 1 : position].strip()
    return None


def judge(prediction: str, gold: Any, options: dict[str, Any]) -> Verdict:
    r"""Judges a whole output.

    Args:
        prediction: the model's output.
        gold: the reference answer as LaTeX or text, bare or inside ``$`` or ``\boxed``.
        options:
            ``answer_format``: ``boxed`` accepts only ``\boxed{}``. With ``any`` (default), math-verify searches an
            output without a box.
            ``strict`` (default true): variable names and the kind of bracket matter, as defined by math-verify.
            ``operators`` (default ``refuse``): ``allow`` accepts operators that the answer leaves unevaluated
            (``\gcd``, ``\sum``) if the reference is a number.
    """
    answer_format = options.get("answer_format", "any")
    if answer_format not in ("boxed", "any"):
        return error(f"math: options.answer_format is {answer_format!r}: use boxed or any")
    if options.get("operators", "refuse") not in ("refuse", "allow"):
        return error(f"math: options.operators is {options['operators']!r}: use refuse or allow")
    rules = Rules(strict=bool(options.get("strict", True)), operators=options.get("operators") == "allow")
    reference = reference_text(str(gold))
    answer = last_boxed(prediction)
    if answer is None:
        return no_answer("no \\boxed{}") if answer_format == "boxed" else judge_plain(prediction, reference, rules)
    if not answer:
        return no_answer("an empty \\boxed{}")
    if len(answer) > MAX_ANSWER_CHARS:
        return unparsable(f"an answer of more than {MAX_ANSWER_CHARS} characters")
    return judge_texts(f"\\boxed{{{answer}}}", reference, rules)


def judge_plain(prediction: str, reference: str, rules: Rules) -> Verdict:
    text = prediction[-MAX_TEXT_CHARS:].strip()
    if not text:
        return no_answer("an empty output")
    return judge_texts(text, reference, rules)


def reference_text(gold: str) -> str:
    """Puts the reference inside a LaTeX environment, as math-verify requires."""
    return gold if LATEX.search(gold) else f"\\boxed{{{gold.strip()}}}"


def judge_texts(answer: str, reference: str, rules: Rules) -> Verdict:
    """Compares two texts that math-verify can parse."""
    answer, reference = (
        GROUPED.sub(lambda number: re.sub("[^0-9]", "", number[0]), text) for text in (answer, reference)
    )
    quick = compare_numbers(answer, reference)
    if quick is not None:
        return correct() if quick else wrong("another number")
    from math_verify import verify

    parsed_reference = parse_text(reference)
    if not parsed_reference:
        return error(f"math: the reference {reference[:100]!r} cannot be parsed")
    parsed_answer = parse_text(answer)
    if not parsed_answer:
        return no_answer("nothing that looks like an answer")
    if verify(list(parsed_reference), list(parsed_answer), strict=rules.strict, timeout_seconds=None):
        reason = _objection(answer, reference, rules)
        return correct() if reason is None else wrong(reason)
    return unparsable("only text") if all(isinstance(item, str) for item in parsed_answer) else wrong()


def _objection(answer: str, reference: str, rules: Rules) -> str | None:
    """Returns why an answer that math-verify accepts is not the single value of the reference. None if it is."""
    from sympy import Expr

    value = next(iter(parse_text(reference)), None)
    if not isinstance(value, Expr):
        return None  # sets, intervals, equations and texts may join several values
    answer, reference = _inside(answer), _inside(reference)
    if answer == reference:
        return None
    found = number_objection(answer, reference) if value.is_number else None
    return found or objection(
        answer, reference, functools.partial(_equal, strict=rules.strict), operators=rules.operators
    )


def _inside(text: str) -> str:
    """Returns the part of a text to compare: the content of its last box, or the answer that math-verify finds."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    found = [item for item in parse_text(text) if isinstance(item, str)]
    return found[-1] if found else text


def _equal(left: str, right: str, *, strict: bool) -> bool:
    from math_verify import verify

    sides = [list(parse_text(f"\\boxed{{{side}}}")) for side in (left, right)]
    return bool(sides[0] and sides[1]) and verify(*sides, strict=strict, timeout_seconds=None)


def compare_numbers(answer: str, reference: str) -> bool | None:
    """Whether two boxed plain numbers are equal. None if one is not a plain number, or if they are close to each other.

    math-verify gives the same result (a test compares both) but is a hundred times slower.
    """
    left, right = plain_number(answer), plain_number(reference)
    if left is None or right is None:
        return None
    if left == right:
        return True
    return False if abs(left - right) > CLEARLY_DIFFERENT * max(Fraction(1), abs(right)) else None


def plain_number(text: str) -> Fraction | None:
    r"""Returns the value of a boxed integer, decimal or simple fraction. None for any other text."""
    match = NUMBER.fullmatch(text.removeprefix("\\boxed{").removesuffix("}")) if text.startswith("\\boxed{") else None
    if match is None:
        return None
    top, bottom = match["decimal"] or match["top"] or match["over"], match["bottom"] or match["under"] or "1"
    return None if int(bottom) == 0 else Fraction(match["sign"] + top) / int(bottom)


@functools.lru_cache(maxsize=1024)
def parse_text(text: str) -> tuple[Any, ...]:
    """Returns math-verify's candidates. Cached, because a group's attempts share the reference and often the answer."""
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))


def warm_up() -> None:
    """Imports the libraries and fills the parser's tables, so that every worker forked later has them."""
    samples = ("42", "\\frac{1}{2}", "x^2+1", "[1,2)", "\\{1,2\\}", "x=3", "\\sqrt{2}", "1.5", "50\\%")
    for sample in samples:
        judge(f"\\boxed{{{sample}}}", sample + " ", {})
        judge(f"\\boxed{{{sample}}}", "7/3", {})
