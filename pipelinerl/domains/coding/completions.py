"""Finds the program in a model's output, and prepares it as the published checkers of coding problems do."""

import builtins
import importlib
import re
import symtable
import warnings
from functools import cache

LANGUAGES = ("python", "python3", "py")
FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+(\w*+)[^\n`]*+$", re.MULTILINE)
STATEMENT = re.compile(
    r"^[ \t]*+(?:(?:async[ \t]++)?def[ \t]|class[ \t]|import[ \t]|from[ \t]++[\w.]++[ \t]++import[ \t])"
    r"|\b(?:print|input)[ \t]*+\(",
    re.MULTILINE,
)
"""A line that a program has, and a sample of its output does not."""
FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
PREPARATION = "import sys as _sys; getattr(_sys, 'set_int_max_str_digits', int)(0); _sys.setrecursionlimit(50_000)"
STANDARD_MODULES = (
    *("time", "fractions", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
"""The checkers of APPS, TACO and LiveCodeBench import these, and their names, before each program."""


def extract_code(completion: str) -> str | None:
    """Returns the last closed fenced block of Python, else the last closed one without a language, else None.

    A block without a language that looks like a program counts as Python.
    """
    code, other, opening = None, None, None
    for fence in FENCE.finditer(completion):
        if opening is None or (fence[3] and not opening[3]):  # a fence that names a language opens a block
            opening = fence
            continue
        if not fence[2].startswith(opening[2]):
            continue
        block, language = completion[opening.end() + 1 : fence.start()], opening[3].lower()
        if language in LANGUAGES or (not language and STATEMENT.search(block)):
            code = without_indent(block, len(opening[1]))
        elif not language:
            other = without_indent(block, len(opening[1]))
        opening = None
    return other if code is None else code


def without_indent(block: str, width: int) -> str:
    """Removes the indentation of the fence, and then that of the first line, from each line."""
    block = re.sub(rf"^[ \t]{{1,{width}}}", "", block, flags=re.MULTILINE) if width else block
    first = len(block) - len(block.lstrip(" \t\n"))
    indent = block[:first].rpartition("\n")[2]
    return re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) if indent else block


def prepared(code: str, *, before: str = "", after: str = "", names_in: str = "") -> str:
    """Returns the program with the standard imports that it lacks and without a limit on the digits of integers.

    Args:
        before: a statement of one line that runs first.
        after: statements that run last.
        names_in: other code that will run in the program's namespace.
    """
    start = max((found.end() for found in FUTURE.finditer(code)), default=0)
    first = "; ".join([PREPARATION, *standard_imports(f"{code}\n{names_in}"), *([before] if before else [])])
    return f"{code[:start]}\n{first}\n{code[start:]}\n{after}"


def standard_imports(code: str) -> list[str]:
    """Returns imports of the standard names that the code uses and does not bind. An empty list if it is not Python."""
    return [standard_names()[name] for name in sorted(unbound_names(code) & standard_names().keys())]


def unbound_names(code: str) -> set[str]:
    """Returns the global names that the code uses and does not bind. An empty set if it is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tables = [symtable.symtable(code, "solution", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    used: set[str] = set()
    bound: set[str] = set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if is_module or symbol.is_global():
                binds = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
                (bound if binds else used).add(symbol.get_name())
    return used - bound


@cache
def standard_names() -> dict[str, str]:
    """Returns name → the statement that imports it. A module's name imports the module, as in the checkers."""
    found = {"np": "import numpy as np"}
    for module in map(importlib.import_module, STANDARD_MODULES):
        public = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
        found |= {name: f"from {module.__name__} import {name}" for name in public if not hasattr(builtins, name)}
    return found | {name: f"import {name}" for name in STANDARD_MODULES}
