r"""Reads the reference answer of a mathematical problem, and refuses texts that no answer could match.

``final_answer`` finds the answer in a worked solution. ``judged_reference`` refuses proofs, prose, programs, and what
the judge's grammar does not cover.
"""

import re

from pipelinerl.chat.continuation import spoken
from pipelinerl.domains.math.answers import wording
from pipelinerl.domains.math.answers.trees import NotParsedError
from pipelinerl.domains.math.answers.wording import WRAPPER, words_of
from pipelinerl.domains.math.judge import MAX_ANSWER_CHARS, boxed_at, last_boxed, parse
from pipelinerl.domains.rows import UnusableRow

GSM8K_ANSWER = re.compile(r"####\s*(.+?)\s*$")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
BOX = re.compile(r"\\fbox(?![A-Za-z])")
DELIMITERS = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
FULL_STOP = re.compile(r"(?<![\s.])\.$")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
PLACEHOLDERS = re.compile(
    r"nan|[-+]?inf|none|null|nil|n/?a|n\.a|<na>|missing|tbd|todo|unknown|omitted|unanswered|q\.?e\.?d|[-—?….]+"
    r"|not ?(?:found|available|applicable|provided|given)|no (?:final )?answer(?: found| provided| given)?"
    r"|(?:a |to be )?(?:proofs?|prove|proved|proven)(?: (?:question|problem|omitted|required))?"
    r"|see (?:the )?(?:solution|proof|answer|explanation|text|info|above|below)"
)
"""Texts of published sets where there is no answer: NuminaMath's `proof` and `notfound`, a program's missing value, and
what people write. `undefined`, `does not exist`, `no solution` and `infinity` are answers."""
OTHER_NOTATION = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?([/.-])\d\d?\1\d{4}|0[xob][0-9a-f]+", re.IGNORECASE)
"""A date, which would be read as a difference or quotient, or a program's number (`0x1f`), as a product with x."""
MAX_WORDS = 6
"""No answer of the published sets in `tests/unit/domains/math_answers` has more than four."""
SENTENCE = re.compile(
    r"\b(?:is|are|was|were|has|have|had|we|let|so|thus|hence|therefore|because|since|then|gets?|got|gives?|answer"
    r"|proves?|proof|shows?|note|consider|suppose|assume)\b", re.IGNORECASE
)  # fmt: skip
"""Words of a sentence about an answer, which an answer does not contain."""
PROGRAM = re.compile(
    r"```|^\s*(?:def \w+\(|class \w+[:(]|import \w+$|from \w+ import|#include|print\(|return )", re.MULTILINE
)


def final_answer(answer: str) -> str:
    r"""Returns the answer of a worked solution, or the text itself.

    A solution ends in ``#### 42`` or holds ``\boxed{42}``, perhaps more than once. A thought before it does not count.

    Raises:
        UnusableRow: its boxes differ, so that the answer is not known, or one is empty or not closed.
    """
    said = spoken(answer)
    match = GSM8K_ANSWER.search(said)
    said = THOUSANDS.sub("", match[1]) if match else said
    said = BOX.sub(r"\\boxed", said)
    boxes, end = [], 0
    for start in (box.start() for box in re.finditer(r"\\boxed(?![A-Za-z])", said)):
        if start >= end:  # not within another
            boxes.append(boxed_at(said, start))
            end = start + len("\\boxed") + len(boxes[-1] or "")
    if not boxes:
        return said or answer
    if len(set(boxes)) > 1:
        raise UnusableRow("its solution has boxes that differ", ", ".join(map(repr, boxes))[:100])
    if not boxes[0]:
        raise UnusableRow("the box of its solution is empty or not closed", repr(said[-60:]))
    return final_answer(boxes[0])


def refuse_placeholder(answer: str) -> None:
    """Raises ``UnusableRow`` for a text that stands for a missing answer."""
    bare = WRAPPER.sub(" ", answer).strip(" .!:()[]'\"*_\n") or answer.strip()
    if PLACEHOLDERS.fullmatch(" ".join(bare.casefold().split())):
        raise UnusableRow("the answer is a placeholder", repr(answer[:60]))


def judged_reference(answer: str) -> str:
    """Returns an answer as a reference for the judge: without the delimiters of mathematics.

    Raises:
        UnusableRow: the judge's grammar does not cover it, or no box can hold it.
    """
    refuse_placeholder(answer)
    text = FULL_STOP.sub("", DELIMITERS.sub("", answer).strip())
    shown = repr(text if len(text) <= 60 else f"{text[:60]}…")
    if len(text) > MAX_ANSWER_CHARS:
        raise UnusableRow("the answer is longer than the judge reads", shown)
    if NUMBER.fullmatch(text):
        return text
    if OTHER_NOTATION.fullmatch(text):
        raise UnusableRow("the answer is a date, or a number as programs write it", shown)
    if PROGRAM.search(text):
        raise UnusableRow("the answer is a program", shown)
    if "\\begin" not in text:
        plain = re.sub(r"\\[A-Za-z]+", " ", text)
        if len(re.findall(r"[^\W\d_]{2,}", plain)) > MAX_WORDS or SENTENCE.search(plain):
            raise UnusableRow("the answer is prose without a box", shown)
    if last_boxed(f"\\boxed{{{text}}}") != text:
        raise UnusableRow("the judge cannot read the answer", shown)
    if words_of(text) is not None or wording.choice(text) is not None or wording.choices(text):
        return text
    try:
        parse(text)
    except (NotParsedError, RecursionError) as error:
        raise UnusableRow("the judge cannot read the answer", f"{shown}: {error}") from error
    return text
