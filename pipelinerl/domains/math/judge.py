"""Judges mathematical answers with math-verify: the answer found, parsed and compared as that library does it.

May run for ever and take any memory (``10^{10^{10}}``): call it only in a limited process, as the verifier does.
Its own alarm-based time-outs are off, the worker's limits replace them.
"""

import functools
import logging
import re
from typing import Any

from pipelinerl.verifier.protocol import Verdict, correct, error, no_answer, unparsable, wrong

logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARS = 1000
MAX_TEXT_CHARS = 4000
"""Of an output without a box, this much of its end is searched for an answer."""
INTEGER = re.compile(r"[-+]?[0-9]{1,15}", re.ASCII)
LATEX_MARKS = ("$", "\\boxed", "\\[", "\\(")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}`` with balanced braces; None when there is none or it is cut."""
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
        gold: the reference answer: bare LaTeX or text, or with ``$``, ``\boxed`` of its own.
        options: ``answer_format``: ``boxed`` (only ``\boxed{}`` counts) or ``any`` (default: without a box the output
            is searched as math-verify does it).
    """
    answer_format = options.get("answer_format", "any")
    if answer_format not in ("boxed", "any"):
        return error(f"math: options.answer_format is {answer_format!r}: use boxed or any")
    reference = reference_text(str(gold))
    answer = last_boxed(prediction)
    if answer is None:
        return no_answer("no \\boxed{}") if answer_format == "boxed" else judge_plain(prediction, reference)
    if not answer:
        return no_answer("an empty \\boxed{}")
    if len(answer) > MAX_ANSWER_CHARS:
        return unparsable(f"an answer of more than {MAX_ANSWER_CHARS} characters")
    return judge_texts(f"\\boxed{{{answer}}}", reference)


def judge_plain(prediction: str, reference: str) -> Verdict:
    text = prediction[-MAX_TEXT_CHARS:].strip()
    if not text:
        return no_answer("an empty output")
    return judge_texts(text, reference)


def reference_text(gold: str) -> str:
    """The reference as math-verify wants it: inside a LaTeX environment."""
    return gold if any(mark in gold for mark in LATEX_MARKS) else f"\\boxed{{{gold.strip()}}}"


def judge_texts(answer: str, reference: str) -> Verdict:
    """Compares two texts that math-verify can parse."""
    quick = compare_integers(answer, reference)
    if quick is not None:
        return correct() if quick else wrong("another number")
    from math_verify import verify

    parsed_reference = parse_text(reference)
    if not parsed_reference:
        return error(f"math: the reference {reference[:100]!r} cannot be parsed")
    parsed_answer = parse_text(answer)
    if not parsed_answer:
        return no_answer("nothing that looks like an answer")
    if verify(list(parsed_reference), list(parsed_answer), timeout_seconds=None):
        return correct()
    return unparsable("only text") if all(isinstance(item, str) for item in parsed_answer) else wrong()


def compare_integers(answer: str, reference: str) -> bool | None:
    """Whether two boxed plain integers are equal; None when one is anything else. math-verify says the same, slowly."""
    boxes = [text[len("\\boxed{") : -1] for text in (answer, reference) if text.startswith("\\boxed{")]
    if len(boxes) != 2 or not all(INTEGER.fullmatch(box) for box in boxes):
        return None
    return int(boxes[0]) == int(boxes[1])


@functools.lru_cache(maxsize=1024)
def parse_text(text: str) -> tuple[Any, ...]:
    """math-verify's candidates; kept because the attempts of a group share reference and often answer."""
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))


def warm_up() -> None:
    """Imports the libraries and fills the parser's tables, so that every worker forked later has them."""
    samples = ("42", "\\frac{1}{2}", "x^2+1", "[1,2)", "\\{1,2\\}", "x=3", "\\sqrt{2}", "1.5", "50\\%")
    for sample in samples:
        judge(f"\\boxed{{{sample}}}", sample + " ", {})
        judge(f"\\boxed{{{sample}}}", "7/3", {})
