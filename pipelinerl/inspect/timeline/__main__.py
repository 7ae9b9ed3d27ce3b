"""`pipelinerl timeline RUN`: what every process of a run did when, for Perfetto, and as a picture.

    pipelinerl timeline results/x                     writes results/x/timeline.json, for https://ui.perfetto.dev
    pipelinerl timeline results/x --png overlap.png   a picture of generation beside training
    pipelinerl timeline results/x --from 10 --to 16   only these seconds of the run

Reads the spans in `traces/` of a running, stopped, killed or finished run and changes nothing else. `tracing.trace_mb`
bounds them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.config.paths import TIMELINE_FILE
from pipelinerl.inspect.reading import command_parser
from pipelinerl.inspect.timeline.chrome import chrome_trace
from pipelinerl.inspect.timeline.overlap import draw, overlap
from pipelinerl.inspect.timeline.reading import between, read_spans
from pipelinerl.world.disk import replace_file


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    spans = between(read_spans(args.run), args.start, args.end)
    path = args.output or args.run / TIMELINE_FILE
    replace_file(path, json.dumps(chrome_trace(spans)))
    print(f"{path}: {len(spans)} spans; open it at https://ui.perfetto.dev")
    if args.png is not None:
        print(overlap(spans).text)
        draw(spans, args.png)
        print(args.png)
    return 0


def parser() -> argparse.ArgumentParser:
    own = command_parser("timeline", __doc__)
    own.add_argument("run", type=Path, help="the run folder")
    own.add_argument("-o", "--output", type=Path, help=f"file to write; else {TIMELINE_FILE} in the run folder")
    own.add_argument("--png", type=Path, help="draw the overlap into this file")
    own.add_argument("--from", dest="start", type=float, default=0.0, metavar="S", help="second of the run to begin at")
    own.add_argument("--to", dest="end", type=float, default=float("inf"), metavar="S", help="second to end at")
    return own


if __name__ == "__main__":
    sys.exit(main())
