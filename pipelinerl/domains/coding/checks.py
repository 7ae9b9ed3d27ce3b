"""Checks the values of calls in a sandbox without the program. The judge sends this file's text there.

Python 3.8 or newer, standard library only. The values are data that `calls.py` wrote. No code of the program runs.
"""

import contextlib
import json
from typing import Any


def check(setup: Any, checks: Any, given: str, marker: str) -> None:
    """Writes ``marker`` and a list that says which checks hold.

    Args:
        setup: statements that run first. Those that need the program fail.
        checks: code for each test, which raises if ``_values`` are wrong.
        given: the values of each check, as a JSON list of texts.
        marker: printed before the result.
    """
    namespace: Any = {}
    for code in setup:
        with contextlib.suppress(Exception):  # the checks that need it fail
            exec(code, namespace)
    held = []
    for code, values in zip(checks, json.loads(given)):  # noqa: B905 — Python 3.8 has no `strict`
        try:
            namespace["_values"] = json.loads(values, object_hook=value_of)
            exec(code, namespace)
        except Exception:  # noqa: BLE001 — the check does not hold, for any error
            held.append(False)
        else:
            held.append(True)
    print(marker, json.dumps(held), sep="")


def value_of(kind: Any) -> Any:
    """Returns the value that `calls.tagged` wrote. An iterator equals nothing. Other objects are only true or false."""
    ((name, items),) = kind.items()
    if name == "complex":
        return complex(*items)
    kinds: Any = {"dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "iterator": iter}
    return Opaque(*items) if name == "object" else kinds[name](items)


class Opaque:
    """An object that is only true or false, such as the result of ``re.match``."""

    def __init__(self, truth: bool):
        self.truth = truth

    def __bool__(self) -> bool:
        return self.truth
