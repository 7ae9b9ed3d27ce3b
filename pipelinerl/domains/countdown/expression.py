"""Parses and evaluates arithmetic by recursive descent, exactly and within limits. Never uses ``eval``.

    expression = term  { ("+" | "-" | "−") term }
    term       = atom  { ("*" | "×" | "·" | "/" | "÷") atom }
    atom       = number | "(" expression ")"
    number     = ASCII digits without leading zeros, at most MAX_DIGITS

Spaces are allowed between symbols. Anything else, such as signs and powers, raises ``ExpressionError``.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 400
MAX_DEPTH = 32
MAX_DIGITS = 9
TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<symbol>[-+−*×·/÷()]))", re.ASCII)


class ExpressionError(ValueError):
    """The text is not an expression of the grammar, or it divides by zero."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    value: Fraction
    numbers: tuple[int, ...]
    """The numbers used, in order of appearance."""


def evaluate(text: str) -> Evaluated:
    """Returns the value of an expression and the numbers in it. Raises ExpressionError."""
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
        tokens.append(match["number"] or match["symbol"])
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

    def take(self) -> str:
        token = self.next
        if token is None:
            raise ExpressionError("the expression ends too early")
        self._position += 1
        return token

    def expression(self, depth: int) -> Fraction:
        value = self.term(depth)
        while self.next in ("+", "-", "−"):
            value = value + self.term(depth) if self.take() == "+" else value - self.term(depth)
        return value

    def term(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while self.next in ("*", "×", "·", "/", "÷"):
            if self.take() in ("*", "×", "·"):
                value *= self.atom(depth)
            else:
                divisor = self.atom(depth)
                if divisor == 0:
                    raise ExpressionError("division by zero")
                value /= divisor
        return value

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if token == "(":
            if depth == MAX_DEPTH:
                raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
            value = self.expression(depth + 1)
            if self.take() != ")":
                raise ExpressionError("a bracket is not closed")
            return value
        if not token.isdigit():
            raise ExpressionError(f"{token!r} where a number is expected")
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
        if token.startswith("0") and token != "0":
            raise ExpressionError(f"{token!r} begins with a zero")
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])
