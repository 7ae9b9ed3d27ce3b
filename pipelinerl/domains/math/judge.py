"""Judges mathematical answers: parses answer and reference, and compares their meaning.

The package ``answers`` parses and compares. math-verify finds the answer in an output without a box, compares where the
grammar does not cover the reference, and evaluates operators where the options allow them.

A check may need much time or memory. Call it only in a process with limits, as the verifier does: they replace
math-verify's alarm-based timeouts, which are off.
"""

import functools
import logging
import re
from typing import Any

from pipelinerl.domains.math.answers import parser, tokens, units, wording
from pipelinerl.domains.math.answers.equality import Rules, same
from pipelinerl.domains.math.answers.forms import UNDONE
from pipelinerl.domains.math.answers.trees import NotParsedError, Refusal
from pipelinerl.domains.math.answers.values import TooLargeError
from pipelinerl.domains.math.answers.wording import words_of
from pipelinerl.domains.rows import is_unusable
from pipelinerl.records.verdicts import Verdict, correct, error, no_answer, unparsable, wrong

logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER_CHARS = 1000
"""PipelineRL's limit (`max_prediction_length`). The answers of published sets are shorter."""
MAX_TEXT_CHARS = 4000
"""An output without a box is searched for an answer in this many characters at its end."""
HARMLESS = "0"
"""An answer that can be compared with every reference that is not broken."""
LATEX = re.compile(r"(?<!\\)\$|\\boxed|\\\[|\\\(")
OPENING = re.compile(r"\\boxed\s*\{")
LEFT_TO_COMPUTE = re.compile(rf"\\(?:{'|'.join(UNDONE)}|[bp]?mod|[lr]floor|[lr]ceil)(?![A-Za-z])")
"""Operators that math-verify computes, and the grammar does not."""

parse = functools.lru_cache(maxsize=1024)(parser.parse)
"""A group's attempts share the reference and often the answer."""


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{…}`` with balanced braces. None if there is none or it is cut."""
    start = text.rfind("\\boxed")
    return None if start < 0 else boxed_at(text, start)


def boxed_at(text: str, start: int) -> str | None:
    r"""Returns the content of the ``\boxed{…}`` that begins at ``start``. None if it is cut."""
    opening = OPENING.match(text, start)
    if opening is None:
        match = re.match(r"\s*([^\s{}$]+)", text[start + len("\\boxed") : start + MAX_TEXT_CHARS])
        return match[1] if match else None
    try:
        end = tokens.closing_brace(text, opening.end() - 1)
    except NotParsedError:
        return None
    return re.sub(r"(?<!\\)\\$", "", text[opening.end() : end].strip()).strip()


def part_to_judge(prediction: str) -> str:
    """Returns the part of an output that ``judge`` reads: its last box, or without a box its end."""
    if "\\boxed" not in prediction:
        return prediction[-MAX_TEXT_CHARS:]
    answer = last_boxed(prediction)
    if answer is None:
        return "\\boxed{"
    return f"\\boxed{{{answer if len(answer) <= MAX_ANSWER_CHARS else '?' * (MAX_ANSWER_CHARS + 1)}}}"


def judge(prediction: str, gold: Any, options: dict[str, Any]) -> Verdict:
    r"""Judges a whole output.

    Args:
        prediction: the model's output.
        gold: the reference answer as LaTeX or text, bare or inside ``$`` or ``\boxed``.
        options:
            ``answer_format``: ``boxed`` accepts only ``\boxed{}``. With ``any`` (default), math-verify searches an
            output without a box.
            ``strict`` (default true): the kind of bracket and the name before an equals sign matter.
            ``operators`` (default ``refuse``): ``allow`` computes operations in the answer (``\gcd``, ``\sum``,
            ``40 + 2``) if the reference is a number.
    """
    answer_format = options.get("answer_format", "any")
    if answer_format not in ("boxed", "any"):
        return error(f"math: options.answer_format is {answer_format!r}: use boxed or any")
    if options.get("operators", "refuse") not in ("refuse", "allow"):
        return error(f"math: options.operators is {options['operators']!r}: use refuse or allow")
    rules = Rules(strict=bool(options.get("strict", True)), operators=options.get("operators") == "allow")
    if is_unusable(gold):
        return error(f"math: the reference is {gold!r}")
    reference = reference_text(str(gold))
    try:
        answer = last_boxed(prediction)
        if answer is None and answer_format == "any":
            answer = answer_in_prose(prediction[-MAX_TEXT_CHARS:].strip())
        if not answer:
            return no_answer(
                "an empty \\boxed{}" if answer is not None else f"no answer (answer_format {answer_format})"
            )
        if len(answer) > MAX_ANSWER_CHARS:
            return unparsable(f"an answer of more than {MAX_ANSWER_CHARS} characters")
        return compare(answer, reference, rules)
    except RecursionError:
        return unparsable("nested too deeply")
    except MemoryError:
        raise
    except Exception as failure:  # noqa: BLE001 — of any library: an answer that makes its judge fail must get a verdict
        compare(HARMLESS, reference, Rules())  # raises if the reference is to blame
        return unparsable(f"the judge fails on it: {type(failure).__name__}: {failure}"[:500])


def answer_in_prose(text: str) -> str | None:
    """Returns math-verify's answer in a text without a box, with the terms that `or` and `and` join to it.

    Words between "the answer is" and the number belong to it.
    """
    found = [item for item in parse_with_library(text) if isinstance(item, str)] if text else []
    if not found or found[-1] not in text:
        return found[-1] if found else None
    before, _, after = text.rpartition(found[-1])
    lead = re.search(r"\b(?:answer|result|value|it)(?: is|:) +([a-z][a-z' -]*)\$?$", before[-100:], re.I)
    first = re.search(r"(\S*\d\S*?),? +(or|and) +\S*$", before[-100:])
    last = re.match(r"\$?,? +(or|and) +(\S*\d[^\s.]*)", after[:100])
    answer = (rf"\text{{{lead[1]}}}" if lead else "") + found[-1]
    return (f"{first[1]} {first[2]} " if first else "") + answer + (f" {last[1]} {last[2]}" if last else "")


def reference_text(gold: str) -> str:
    """Returns the reference without its LaTeX environment."""
    if not LATEX.search(gold):
        return gold.strip()
    return last_boxed(gold) or answer_in_prose(gold) or gold.strip()


def compare(answer: str, reference: str, rules: Rules) -> Verdict:
    """Compares an answer with a reference, both without an environment."""
    words = words_of(reference)
    if answer == reference or (words is not None and words_of(answer) == words):
        return correct()
    if (wanted_choice := wording.choice(reference)) is not None and (chosen := wording.choice(answer)) is not None:
        if chosen.letter != wanted_choice.letter:
            return wrong("another choice")
        if not (chosen.has_text and wanted_choice.has_text):
            return correct()
    if (several := wording.choices(reference)) and several == wording.choices(answer):
        return correct()
    refusal = unparsable("no answer of the grammar")
    for bare_units in (True, False):
        try:
            wanted = parse(reference, bare_units=bare_units)
        except NotParsedError:
            return compare_with_library(answer, reference, rules)
        try:
            same(parse(answer, bare_units=bare_units), wanted, rules)
        except NotParsedError as reason:
            refusal = unparsable(str(reason))
        except TooLargeError as reason:
            return unparsable(str(reason))
        except Refusal as reason:
            refusal = wrong(str(reason))
        else:
            return correct()
    other_names = not rules.strict and refusal.status == "wrong"  # of variables: the library takes them for the same
    if not other_names and not (rules.operators and LEFT_TO_COMPUTE.search(answer)):
        return refusal
    second = compare_with_library(answer, reference, rules)
    return refusal if second.status == "error" else second


def compare_with_library(answer: str, reference: str, rules: Rules) -> Verdict:
    from math_verify import verify

    sides = [list(parse_with_library(f"\\boxed{{{side}}}")) for side in (reference, answer)]
    if not sides[0]:
        return error(f"math: the reference {reference[:100]!r} cannot be parsed")
    if not sides[1]:
        return unparsable("nothing that looks like an answer")
    return correct() if verify(*sides, strict=rules.strict, timeout_seconds=None) else wrong()


@functools.lru_cache(maxsize=1024)
def parse_with_library(text: str) -> tuple[Any, ...]:
    from math_verify import parse as parse_text

    return tuple(parse_text(text, parsing_timeout=None))


def warm_up() -> None:
    """Imports the libraries and fills the parsers' tables, so that every worker forked later has them."""
    units.registry()
    samples = ("42", "\\frac{1}{2}", "x^2+1", "[1,2)", "\\{1,2\\}", "x=3", "\\sqrt{2}", "5\\text{ cm}", "50\\%")
    for sample in samples:
        judge(f"\\boxed{{{sample}}}", "7/3", {})
        judge(f"\\boxed{{{sample}}}", "5\\text{ km}", {})
        parse_with_library(f"\\boxed{{{sample}}}")
