"""`pipelinerl report RUN [RUN2 …]`: one HTML file about one or several runs, which opens from the disk.

    pipelinerl report results/x                    writes results/x/report.html
    pipelinerl report results/x results/y -o c.html     the two side by side
    pipelinerl report results/x --serve                 the same page on loopback, up to date

Reads the folder of a running, stopped, killed or finished run and changes nothing else in it.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.config.paths import REPORT_FILE
from pipelinerl.inspect.page.build import LOOPBACK, LiveRuns, make_server, write_page
from pipelinerl.inspect.reading import command_parser, port_number


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.serve:
        return serve(args.runs, args.port)
    path = args.output or args.runs[0] / REPORT_FILE
    started = time.perf_counter()
    size = write_page(args.runs, path)
    print(f"{path}: {size / 2**20:.1f} MB in {time.perf_counter() - started:.1f} s")
    return 0


def serve(runs: Sequence[Path], port: int) -> int:
    """Serve the live page until interrupted. `port` = 0 takes a free port."""
    live = LiveRuns(runs)
    live.runs()  # an error about a folder that is no run appears here, not in the browser
    with make_server(live, port) as server:
        print(f"http://{LOOPBACK}:{server.server_address[1]}/ (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def parser() -> argparse.ArgumentParser:
    own = command_parser("report", __doc__)
    own.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    own.add_argument("-o", "--output", type=Path, help=f"file to write; else {REPORT_FILE} in the first run's folder")
    own.add_argument("--serve", action="store_true", help="serve it on loopback, kept up to date during a run")
    own.add_argument("--port", type=port_number, default=0, help="of --serve; else a free one")
    return own


if __name__ == "__main__":
    sys.exit(main())
