"""`pipelinerl report RUN [RUN2 …]`: one HTML file about one or several runs, which opens from the disk.

    pipelinerl report results/x                    writes results/x/report.html
    pipelinerl report results/x results/y -o c.html     the two beside each other

Reads the folder of a running, stopped, killed or finished run and changes nothing else in it.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.errors import told_in_one_line
from pipelinerl.inspect.page.build import REPORT_FILE, write_page


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    args = parser().parse_args(argv)
    path = args.output or args.runs[0] / REPORT_FILE
    started = time.perf_counter()
    size = write_page(args.runs, path)
    print(f"{path}: {size / 2**20:.1f} MB in {time.perf_counter() - started:.1f} s")
    return 0


def parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    own = argparse.ArgumentParser(
        prog="pipelinerl report",
        description=lines[0],
        epilog="\n".join(lines[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    own.add_argument("-o", "--output", type=Path, help=f"file to write; else {REPORT_FILE} in the first run's folder")
    return own


if __name__ == "__main__":
    sys.exit(told_in_one_line(main))
