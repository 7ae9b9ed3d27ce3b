"""Nothing is written twice: no two modules have the same run of statements or of list elements."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pipelinerl", "tests", "benchmarks")

STATEMENTS_SIZE = 50
"""Nodes of the syntax tree from which equal statements count as copied: about five lines of code."""
ELEMENTS_SIZE = 20
"""The same for the elements of a list or tuple."""
NO_CODE = (ast.Import, ast.ImportFrom)

ALLOWED: set[frozenset[str]] = set()
"""Pairs of modules that share code for a reason."""


def runs(tree: ast.Module) -> Iterator[tuple[Sequence[ast.AST], int]]:
    """Every sequence of siblings that can be copied, and the size from which a part of it counts."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield [item for item in block if not isinstance(item, NO_CODE) and not is_text(item)], STATEMENTS_SIZE
        if isinstance(node, ast.List | ast.Tuple):
            yield node.elts, ELEMENTS_SIZE


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def parts(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(text, line) of the shortest part of each run that is long enough, from each of its places on."""
    for run, least in runs(tree):
        texts, sizes = [ast.dump(item) for item in run], [sum(1 for _ in ast.walk(item)) for item in run]
        for first in range(len(run)):
            size = 0
            for last in range(first, len(run)):
                size += sizes[last]
                if size >= least:
                    yield "\n".join(texts[first : last + 1]), run[first].lineno  # type: ignore[attr-defined]
                    break


def copies(modules: dict[str, ast.Module]) -> dict[frozenset[str], str]:
    """Modules with an equal part, and the place of its last one."""
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for name, tree in modules.items():
        for text, line in parts(tree):
            places[text][name] = line
    return {
        frozenset(found): ", ".join(f"{name}:{line}" for name, line in found.items())
        for found in places.values()
        if len(found) > 1
    }


def test_no_two_modules_have_the_same_code() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = copies({str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths})
    assert [place for modules, place in found.items() if modules not in ALLOWED] == []
    assert [sorted(modules) for modules in ALLOWED - found.keys()] == [], "they differ now: remove them from ALLOWED"


def test_copies_are_seen() -> None:
    body = "".join(f"    value_{i} = compute(first, second, {i}) + offset[{i}]\n" for i in range(8))
    given = "".join(f"    f'key_{i}={{value}}',\n" for i in range(8))
    modules = {
        "a": f"def f():\n{body}",
        "b": f"def g():\n    start()\n{body}",
        "c": f"x = [\n{given}]",
        "d": f"y = [0, {given}]",
    }
    found = copies({name: ast.parse(text) for name, text in modules.items()})
    assert set(found) == {frozenset("ab"), frozenset("cd")}
    assert found[frozenset("cd")].startswith("c:")
