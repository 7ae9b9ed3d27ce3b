"""The value of a tree: exact where it is rational, else to ``DIGITS`` digits at given values of its symbols."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from pipelinerl.domains.math.answers.trees import Num, Op, Sym, Tree, UnitWords

DIGITS = 60
"""Digits of a value that is not rational: twice those of `equality.TOLERANCE`, so that rounding does not matter."""
MAX_POWER_DIGITS = 20_000
"""A power or factorial with more digits is not computed."""
MAX_BITS = 200_000
"""Bits of a power that is computed exactly. A larger one is computed to `DIGITS` digits."""
CONSTANTS: dict[str, Any] = {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1), "infty": mpmath.inf}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add, "*": operator.mul, "/": operator.truediv, "neg": operator.neg, "abs": abs,
}  # fmt: skip
FUNCTIONS = re.compile("(?:arc)?(?:sin|cos|tan|sinh|cosh|tanh)|cot|sec|csc")


class NoValueError(ValueError):
    """The tree has no value: it is not a number, not real, or undefined at this point."""


class TooLargeError(ValueError):
    """The value has more digits than are computed."""


def exact(tree: Tree) -> Fraction | None:
    """The value if it is rational arithmetic of numbers, else None."""
    if isinstance(tree, Num):
        return tree.value
    if isinstance(tree, UnitWords) and tree.words == "%":
        return Fraction(1, 100)
    if not isinstance(tree, Op):
        return None
    values = [exact(part) for part in tree.args]
    if any(value is None for value in values):
        return None
    return _exact_operation(tree.name, [value for value in values if value is not None])


def _exact_operation(name: str, values: list[Fraction]) -> Fraction | None:
    left, right = values[0], values[-1]
    if name in ARITHMETIC:
        return ARITHMETIC[name](*values) if right or name != "/" else None
    if right.denominator != 1:
        return None
    if name == "!":
        return Fraction(math.factorial(int(left))) if 0 <= left <= 2000 else None
    if name != "^" or (left == 0 and right <= 0):
        return None
    too_large = abs(right) * max(left.numerator.bit_length(), left.denominator.bit_length()) > MAX_BITS
    return None if too_large else left ** int(right)


def numeric(tree: Tree, at: Mapping[str, Any], *, real: bool, log_base: int = 10, bits: list[int] | None = None) -> Any:
    """Evaluates a tree.

    Args:
        tree: of numbers, symbols and operations.
        at: the value of every free symbol.
        real: an intermediate result that is not real has no value.
        log_base: base of a logarithm without one. 0: the natural logarithm.
        bits: takes the binary exponent of every number on the way.
    Raises:
        NoValueError: the tree has no value at these symbols.
        TooLargeError: a power is too large.
    """
    rational = exact(tree)
    if rational is not None:
        if bits is not None:
            bits += (rational.numerator.bit_length(), rational.denominator.bit_length())
        return mpmath.mpf(rational.numerator) / rational.denominator
    if isinstance(tree, Sym):
        if real and tree.name == "i" and "i" not in at:
            raise NoValueError("not a real number")
        if tree.name not in at and tree.name not in CONSTANTS:
            raise NoValueError(f"the value of {tree.name} is unknown")
        return at[tree.name] if tree.name in at else +CONSTANTS[tree.name]
    if isinstance(tree, UnitWords):
        if tree.words in ("degree", "degrees", "deg"):
            return mpmath.pi / 180
        if tree.words in ("rad", "radian", "radians"):
            return mpmath.mpf(1)
        raise NoValueError(f"{tree.words!r} is no number")
    if not isinstance(tree, Op):
        raise NoValueError("no number")
    values = [numeric(part, at, real=real, log_base=log_base, bits=bits) for part in tree.args]
    try:
        result = _operation(tree.name, values, log_base)
    except (ZeroDivisionError, OverflowError) as error:
        raise NoValueError("undefined") from error
    if mpmath.isnan(result) or (real and not mpmath.im(result) == 0):
        raise NoValueError("not a real number")
    if bits is not None and mpmath.isfinite(result) and result != 0:
        bits.append(abs(mpmath.mag(result)))
        if tree.name == "tanh":  # it comes near to 1 as fast as e^{-2x} to 0
            bits.append(int(3 * min(abs(values[0]), MAX_POWER_DIGITS * 10)))
    return mpmath.re(result) if real else result


def _operation(name: str, values: list[Any], log_base: int) -> Any:
    if name in ARITHMETIC:
        return ARITHMETIC[name](*values)
    left, right = values[0], values[-1]
    match name:
        case "^":
            return _power(left, right)
        case "root":
            if mpmath.im(right) == 0 and right < 0 and left == int(left) and int(left) % 2:
                return -mpmath.root(-right, int(left))
            return _power(right, 1 / left)
        case "!":
            return _gamma(left)
        case "binom":
            if max(abs(left), abs(right)) > MAX_POWER_DIGITS:
                raise TooLargeError("a binomial coefficient of large numbers")
            return mpmath.binomial(left, right)
        case "ln":
            return mpmath.log(left)
        case "log":
            if len(values) == 2:
                return mpmath.log(left) / mpmath.log(right)
            return mpmath.log(left) / (mpmath.log(log_base) if log_base else 1)
    if not FUNCTIONS.fullmatch(name):
        raise NoValueError(f"{name} has no value")
    return getattr(mpmath, name.replace("arc", "a"))(left)


def _power(base: Any, exponent: Any) -> Any:
    if base != 0 and not mpmath.isinf(base) and not mpmath.isinf(exponent):
        digits = abs(exponent) * abs(mpmath.log10(abs(base))) if abs(base) != 1 else 0
        if digits > MAX_POWER_DIGITS:
            raise TooLargeError("a power with too many digits")
    return mpmath.power(base, exponent)


def _gamma(value: Any) -> Any:
    if abs(value) > MAX_POWER_DIGITS:
        raise TooLargeError("a factorial of a large number")
    if mpmath.im(value) == 0 and value < 0:
        raise NoValueError("a factorial of a negative number")
    return mpmath.factorial(value)
