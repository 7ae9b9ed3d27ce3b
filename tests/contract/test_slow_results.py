"""The recorded results of slow tests: what is written, and that they are of tests that exist."""

import json
import re
from pathlib import Path

import pytest

from tests.slow_results import RESULTS, SlowResults

ROOT = Path(__file__).parents[2]


def report(name: str, when: str, outcome: str, keywords: tuple[str, ...] = ("slow",)) -> pytest.TestReport:
    return pytest.TestReport(
        f"tests/test_x.py::{name}",
        ("tests/test_x.py", 1, name),
        dict.fromkeys(keywords, 1),
        outcome,  # type: ignore[arg-type]
        None,
        when,  # type: ignore[arg-type]
        duration=2.04,
    )


def test_worst_outcome_of_each_slow_test_is_added_to_the_results_of_before(tmp_path: Path):
    file = tmp_path / "results.json"
    file.write_text('{"tests/test_x.py::before": {"outcome": "passed", "seconds": 1.0, "commit": "aaa", "cores": 2}}')
    results = SlowResults(file, "bbb+")
    for when in ("setup", "call", "teardown"):
        results.pytest_runtest_logreport(report("good", when, "passed"))
        results.pytest_runtest_logreport(report("leaks", when, "failed" if when == "teardown" else "passed"))
        results.pytest_runtest_logreport(report("fast", when, "passed", ()))
    results.pytest_runtest_logreport(report("skips", "setup", "skipped"))
    results.pytest_runtest_logreport(report("interrupted", "setup", "passed"))
    results.pytest_sessionfinish()
    found = json.loads(file.read_text())
    assert {name.split("::")[1]: (of["outcome"], of["seconds"], of["commit"]) for name, of in found.items()} == {
        "before": ("passed", 1.0, "aaa"),
        "good": ("passed", 2.0, "bbb+"),
        "leaks": ("failed", 2.0, "bbb+"),
        "skips": ("skipped", 0.0, "bbb+"),
    }


def test_recorded_results_are_of_tests_that_exist():
    for name in json.loads(RESULTS.read_text()):
        file, _, function = name.partition("::")
        assert re.search(rf"def {re.escape(function.split('[')[0])}\(", (ROOT / file).read_text()), name
