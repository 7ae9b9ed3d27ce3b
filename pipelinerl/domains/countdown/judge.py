r"""Judges a countdown answer: the last ``<answer>…</answer>`` must hit the target with the given numbers.

Its cost is bounded, so the domain calls it directly. The verifier offers it, too. Values are exact, never by ``eval``:

    expression = term  { ("+" | "-" | "−") term }
    term       = atom  { ("*" | "×" | "·" | "⋅" | "\times" | "\cdot" | "/" | "÷" | "\div") atom }
    atom       = number | "(" expression ")" | "\frac" "{" expression "}" "{" expression "}"
    number     = ASCII digits without leading zeros, at most MAX_DIGITS

Spaces, ``\left`` and ``\right`` are allowed between symbols. Anything else, such as signs and powers, raises
``ExpressionError``.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipelinerl.domains.answer_tag import CLOSING, OPENING, last_answer
from pipelinerl.records.verdicts import Verdict, correct, no_answer, unparsable, wrong

MAX_LENGTH = 400
"""Characters of an expression. With `MAX_DIGITS`, it bounds the exact value to 400 digits, and so the cost."""
MAX_DEPTH = 32
"""Nested brackets: far from the interpreter's limit of recursion, at four calls for each."""
MAX_DIGITS = 9
"""Digits of a number. The game's numbers have two."""
OPERATORS = {"−": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "\\times": "*", "\\cdot": "*", "\\div": "/"}
FRACTION = "\\frac"
OPERATORS |= {"\\dfrac": FRACTION, "\\tfrac": FRACTION}
TOKEN = re.compile(
    r"(?:\s|\\(?:left|right)(?=\s*[()]))*(?:(?P<number>[0-9]+)"
    r"|(?P<symbol>[-+−*×·⋅/÷(){}]|\\(?:times|cdot|div|[dt]?frac)(?![A-Za-z])))",
    re.ASCII,
)


class ExpressionError(ValueError):
    """The text is not an expression of the grammar, or it divides by zero."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    value: Fraction
    numbers: tuple[int, ...]
    """The numbers used, in order of appearance."""


def evaluate(text: str) -> Evaluated:
    """Returns the value of an expression and the numbers in it. Raises ``ExpressionError``."""
    reader = TokenReader(tokens_of(text))
    value = reader.expression(depth=0)
    if reader.next is not None:
        raise ExpressionError(f"{reader.next!r} after the end of the expression")
    return Evaluated(value=value, numbers=tuple(reader.numbers))


def tokens_of(text: str) -> list[str]:
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    tokens, position = [], 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"{text[position:].lstrip()[:1]!r} is not allowed")
        tokens.append(match["number"] or OPERATORS.get(match["symbol"], match["symbol"]))
        position = match.end()
    return tokens


class TokenReader:
    """Consumes tokens from left to right."""

    def __init__(self, tokens: list[str]):
        self.numbers: list[int] = []
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def next_token(self) -> str:
        token = self.next
        if token is None:
            raise ExpressionError("the expression ends too early")
        self._position += 1
        return token

    def expression(self, depth: int) -> Fraction:
        value = self.term(depth)
        while self.next in ("+", "-"):
            value = value + self.term(depth) if self.next_token() == "+" else value - self.term(depth)
        return value

    def term(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while self.next in ("*", "/"):
            if self.next_token() == "*":
                value *= self.atom(depth)
            else:
                value = quotient(value, self.atom(depth))
        return value

    def group(self, depth: int, closing: str) -> Fraction:
        """Reads an expression and its closing bracket."""
        if depth == MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        value = self.expression(depth + 1)
        if self.next_token() != closing:
            raise ExpressionError("a bracket is not closed")
        return value

    def braces(self, depth: int) -> Fraction:
        if self.next_token() != "{":
            raise ExpressionError("a fraction without braces")
        return self.group(depth, "}")

    def atom(self, depth: int) -> Fraction:
        token = self.next_token()
        if token == "(":
            return self.group(depth, ")")
        if token == FRACTION:
            top, bottom = self.braces(depth), self.braces(depth)
            return quotient(top, bottom)
        if not token.isdigit():
            raise ExpressionError(f"{token!r} where a number is expected")
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
        if token.startswith("0") and token != "0":
            raise ExpressionError(f"{token!r} begins with a zero")
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])


def quotient(top: Fraction, bottom: Fraction) -> Fraction:
    if bottom == 0:
        raise ExpressionError("division by zero")
    return top / bottom


def part_to_judge(prediction: str) -> str:
    """Returns the part of an output that ``judge`` reads: its last answer, cut where the grammar refuses it anyway."""
    answer = last_answer(prediction)
    return "" if answer is None else f"{OPENING}{answer[: 3 * MAX_LENGTH]}{CLOSING}"


def judge(prediction: str, gold: dict[str, Any], options: dict[str, Any]) -> Verdict:
    """Judges a whole output.

    Args:
        prediction: the model's output.
        gold: ``{"numbers": [int, …], "target": int}``.
        options: ``{"use_all": bool}``: every number must be used (default), or each at most once.
    """
    answer = last_answer(prediction)
    if answer is None:
        return no_answer("no <answer> … </answer>")
    return judge_expression(answer, gold["numbers"], gold["target"], use_all=options.get("use_all", True))


def judge_expression(text: str, numbers: Sequence[int], target: int, *, use_all: bool = True) -> Verdict:
    """Judges a bare expression, which ``= value`` may follow.

    ``use_all``: every number must be used, otherwise each at most once.
    """
    expression, equals, claim = text.partition("=")
    try:
        evaluated = evaluate(expression)
        claimed = evaluate(claim).value if equals else evaluated.value
    except ExpressionError as error:
        return unparsable(str(error))
    used, given = Counter(evaluated.numbers), Counter(numbers)
    if (use_all and used != given) or not used <= given:
        return wrong(f"uses {list(evaluated.numbers)} of {list(numbers)}")
    return correct() if evaluated.value == claimed == target else wrong(f"equals {evaluated.value}")
