"""Runs the GPU tests, prints a table of their results and writes it as JSON.

    python -m benchmarks.gpu_check --out results/gpu_check.json

Ends with the exit code of pytest, or with 2 where torch sees no GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}


def read_results(report: Path) -> list[dict[str, Any]]:
    """Module, name, outcome, seconds and reason of each test in a JUnit report."""
    results = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        child = next((child for child in case if child.tag in OUTCOMES), None)
        results.append(
            {
                "module": case.get("classname", "").rpartition(".")[2],
                "test": case.get("name"),
                "outcome": "passed" if child is None else OUTCOMES[child.tag],
                "seconds": round(float(case.get("time", 0)), 1),
                "reason": "" if child is None else (child.get("message") or "")[:200],
            }
        )
    return results


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device, so there is nothing to check", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", f"--junitxml={report}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        results = read_results(report)
    table = Table(title=f"GPU tests on {device_name()}")
    for column in ("module", "test", "outcome", "seconds", "reason"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(*(str(value) for value in result.values()))
    Console().print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"device": device_name(), "results": results}, indent=2) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
