"""Runs the GPU tests, prints a table of their results and writes it as JSON.

    python -m benchmarks.gpu_tests --out results/gpu_tests.json [--only engines swap]

Each module of tests runs in a process of its own, the quick ones first, and the file is written again after each. A
module that crashes, hangs or finds no time left costs only its own results. Needs pytest, but none of its plugins. Ends
with 1 if a test failed or did not run to its end, and with 2 where torch sees no GPU.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "gpu"
QUICK_FIRST = (
    *("receiver", "bucket_transport", "swap", "attention", "rl_step", "engines", "quickstart", "images", "one_card"),
)
PLUGINS = ("pytest_asyncio", "pytest_timeout", "xdist")
"""What the project's pytest settings need. Without them the settings are left out."""
LIMIT_S = 2400
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}


def read_results(report: Path, module: str) -> list[dict[str, Any]]:
    """Module, name, outcome, seconds and reason of each test in a module's JUnit report."""
    results = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        child = next((child for child in case if child.tag in OUTCOMES), None)
        results.append(
            {
                "module": module,
                "test": case.get("name"),
                "outcome": "passed" if child is None else OUTCOMES[child.tag],
                "seconds": round(float(case.get("time", 0)), 1),
                "reason": "" if child is None else (child.get("message") or "")[:200],
            }
        )
    return results


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def modules() -> list[Path]:
    """The modules of GPU tests. Those that `QUICK_FIRST` does not name come last."""
    order = {f"test_{name}_gpu": place for place, name in enumerate(QUICK_FIRST)}
    return sorted(FOLDER.glob("test_*.py"), key=lambda path: (order.get(path.stem, len(order)), path.name))


def pytest_options() -> list[str]:
    if all(importlib.util.find_spec(name) for name in PLUGINS):
        return []
    return ["-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider"]


def run_module(path: Path, command: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    """The results of a module's tests, or one line that says why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        report, started = Path(folder) / "report.xml", time.monotonic()
        try:
            code = subprocess.run(
                [*command, str(path), f"--junitxml={report}"],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
                check=False,
                timeout=timeout_s,
            ).returncode
            reason = f"pytest ended with {code}"
        except subprocess.TimeoutExpired:
            reason = f"did not end within {timeout_s:.0f} s"
        if report.exists():
            return read_results(report, path.stem)
        seconds = round(time.monotonic() - started, 1)
        return [{"module": path.stem, "test": "", "outcome": "error", "seconds": seconds, "reason": reason}]


def run_all(paths: Sequence[Path], out: Path, limit_s: float) -> list[dict[str, Any]]:
    """The results of all modules. `out` has what is known so far."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *pytest_options()]
    results: list[dict[str, Any]] = []
    deadline = time.monotonic() + limit_s
    out.parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        results += run_module(path, command, max(deadline - time.monotonic(), 0.0))
        found = {"device": device_name(), "torch": torch.__version__, "results": results}
        out.write_text(json.dumps(found, indent=2) + "\n")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all tests together")
    parser.add_argument("--only", nargs="+", choices=QUICK_FIRST, default=QUICK_FIRST, help="modules of tests")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_tests: torch sees no CUDA device, so there is nothing to check", file=sys.stderr)
        return 2
    chosen = [path for path in modules() if path.stem.removeprefix("test_").removesuffix("_gpu") in args.only]
    results = run_all(chosen, args.out, args.limit_s)
    table = Table(title=f"GPU tests on {device_name()}")
    for column in ("module", "test", "outcome", "seconds", "reason"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(*(str(value) for value in result.values()))
    Console().print(table)
    return int(any(result["outcome"] not in ("passed", "skipped") for result in results))


if __name__ == "__main__":
    sys.exit(main())
