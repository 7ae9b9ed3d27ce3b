"""The list of mutation tests and their recorded results. The mutants themselves run with `make test-mutation`."""

import json
from pathlib import Path

import pytest

from tests.mutation.modules import RESULTS, Module, complaints, read_modules

ROOT = Path(__file__).parents[2]


def test_listed_modules_and_their_tests_exist() -> None:
    for module in read_modules():
        assert [path for path in (module.path, *module.tests) if not (ROOT / path).is_file()] == [], module.name


def test_explained_mutants_are_of_lines_that_their_module_has() -> None:
    for module in read_modules():
        lines = {line.strip() for line in (ROOT / module.path).read_text(encoding="utf-8").splitlines()}
        assert [name for name in module.explained if name.partition(" → ")[0] not in lines] == [], module.name


def test_recorded_results_are_of_listed_modules_and_good_enough() -> None:
    """A module that was listed and not yet run has no result: `make test-mutation` complains, this test does not."""
    results, modules = json.loads(RESULTS.read_text()), read_modules()
    assert results.keys() <= {module.name for module in modules}
    assert complaints(results, [module for module in modules if module.name in results]) == []


def test_complaints_name_what_is_missing_too_low_or_out_of_date() -> None:
    modules = [Module(name, f"{name}.py", [], {}) for name in ("good", "low", "stale", "never")]
    results = {
        "good": {"share": 0.95, "explained_but_killed": []},
        "low": {"share": 0.9499, "explained_but_killed": []},
        "stale": {"share": 1.0, "explained_but_killed": ["x < 1 → x <= 1"]},
    }
    assert complaints(results, modules) == [
        "low: 94.99% of the mutants are killed or explained, 95% must be",
        "stale: an explanation is of no survivor: x < 1 → x <= 1",
        "never was never run",
    ]


SOURCE = """\
from functools import cache
LIMIT = 0.5

@cache
def f(x: int | None, *, n: int = 2) -> int | None:
    if not x < LIMIT:
        return max(x, n)
    for y, z in zip(x, n, strict=True):
        n += y
    return g(x)[n]

def g(x):
    return x and True
"""


def test_mutants_change_one_thing_that_runs_and_are_no_two_alike() -> None:
    mutants = pytest.importorskip("tests.mutation.mutants", reason="needs `pip install cosmic-ray`").mutants_of(SOURCE)
    assert [(mutant.number, mutant.becomes) for mutant in mutants] == [
        (2, "LIMIT = 0.25"),
        (2, "LIMIT = 1.0"),
        (5, "def f(x: int | None, *, n: int = 1) -> int | None:"),
        (5, "def f(x: int | None, *, n: int = 3) -> int | None:"),
        (6, "if not x <= LIMIT:"),
        (6, "if not x >= LIMIT:"),
        (7, "return (x)"),
        (7, "return min(x, n)"),
        (8, "for y, z in []:"),
        (9, "n -= y"),
        (9, "pass"),
        (10, "return g(x)"),
        (13, "return x and False"),
        (13, "return x or True"),
    ]
