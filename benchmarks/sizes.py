"""Runs the size matrix (``tests/sizes``), slow half included, and records what became of every case.

    python -m benchmarks.sizes --json benchmarks/sizes.json [-k EXPRESSION]

Cases of an earlier record that are not run again stay in it, with the commit at which they ran.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.provenance import ROOT, commit, machine


def run(marks: str, expression: str) -> dict[str, Any]:
    """Result of every case by its name."""
    tested = commit()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "tests/sizes", "-m", marks, f"--junitxml={report}"]
        subprocess.run([*command, "--timeout=900", *(["-k", expression] if expression else [])], cwd=ROOT, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        return {
            f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}": {
                "outcome": next(
                    (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
                ),
                "seconds": round(float(case.get("time", 0)), 1),
                "commit": tested,
                "load": round(os.getloadavg()[0], 1),
            }
            for case in cases
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("-m", dest="marks", default="slow or not slow", help="pytest's marks")
    parser.add_argument("-k", dest="expression", default="", help="pytest's expression")
    args = parser.parse_args()
    cases = run(args.marks, args.expression)
    if args.json:
        known = json.loads(args.json.read_text())["cases"] if args.json.exists() else {}
        document = {
            "machine": machine(),
            "cases": dict(sorted((known | cases).items())),
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(any(case["outcome"] != "passed" for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
