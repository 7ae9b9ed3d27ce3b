"""Evaluates sums of whole numbers, as 7-2+10."""

import re


def evaluate(text: str) -> int:
    """Returns the value of terms that are added and subtracted from left to right."""
    first, *rest = re.findall(r"\d+|[+-]", text)
    value, sign = int(first), 1
    for part in rest:
        if part in "+-":
            sign *= 1 if part == "+" else -1
        else:
            value += sign * int(part)
    return value
