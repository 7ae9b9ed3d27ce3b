"""Calls a program's functions in the program's process and writes their values. The judge sends this file's text.

Python 3.8 or newer, standard library only. A value is written as JSON. A kind that JSON does not have is an object with
one key, its name: ``{"tuple": […]}``, ``{"dict": [[key, value], …]}``. So a program can only choose its value.
"""

import json
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any


def call(program: Any, name: str, given: str, marker: str) -> None:
    """Calls a function of the program. Writes ``marker`` and the value.

    Args:
        program: namespace of the program.
        name: the function, or a method of ``class Solution``.
        given: the arguments, as a JSON list.
        marker: printed between the program's own output and the value.
    """
    arguments = json.loads(given)
    if arguments and isinstance(arguments[0], dict):
        arguments[0] = with_integer_keys(arguments[0])
    solution = program.get("Solution")
    function = getattr(solution(), name) if hasattr(solution, name) else program[name]
    answer(marker, function(*arguments))


def with_integer_keys(mapping: Any) -> Any:
    """Converts keys back to integers, since JSON's keys are texts. The checkers of APPS and TACO do so, too."""
    try:
        return {int(key): value for key, value in mapping.items()}
    except ValueError:
        return mapping


def evaluate(program: Any, setup: str, given: str, marker: str) -> None:
    """Evaluates a JSON list of expressions in the program's namespace. Writes ``marker`` and the values."""
    exec(setup, program)
    answer(marker, [eval(expression, program) for expression in json.loads(given)])


def answer(marker: str, value: Any) -> None:
    print(marker, json.dumps(tagged(value)), sep="", file=sys.__stdout__, flush=True)


def tagged(value: Any) -> Any:
    """Returns a value as JSON with kinds. NumPy's values and other numbers become Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {"dict": [[tagged(key), tagged(item)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [tagged(item) for item in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": list(value)}
    if isinstance(value, list):
        return [tagged(item) for item in value]
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (Decimal, Fraction)):
        return int(value) if value == int(value) else float(value)
    if hasattr(value, "__iter__"):
        return {"iterator": [tagged(item) for item in value]}
    return {"object": [bool(value)]}
