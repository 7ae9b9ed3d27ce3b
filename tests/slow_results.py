"""A pytest plugin: writes the result of every slow test, with the commit it ran on, beside the results of before.

`make test-slow` loads it. The file is committed, so that it says which slow tests have passed, and on which code.
"""

import json
import os
from pathlib import Path

import pytest

from benchmarks.provenance import commit

RESULTS = Path(__file__).with_name("slow_results.json")


class SlowResults:
    """Collects the outcome of the tests of one session.

    Args:
        file: to which they are added.
        commit: the code that is tested.
    """

    def __init__(self, file: Path, commit: str):
        self._file, self._commit = file, commit
        self._found: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst outcome of a test's set-up, call and teardown counts, and the seconds of its call."""
        if "slow" not in report.keywords or (report.when == "setup" and report.passed):  # its call may be interrupted
            return
        entry = self._found.setdefault(report.nodeid, {"outcome": report.outcome, "seconds": 0.0})
        if report.when == "call":
            entry["seconds"] = round(report.duration, 1)
        if report.outcome != "passed":
            entry["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        """Adds what was found to the file."""
        if not self._found:
            return
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        of = {"commit": self._commit, "cores": os.cpu_count()}
        known |= {name: entry | of for name, entry in self._found.items()}
        self._file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Only the session that the user started writes: the workers of xdist report to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowResults(RESULTS, commit(config.rootpath)))
