"""`pipelinerl why RUN`: what keeps a run from learning, the likeliest cause first.

    pipelinerl why results/x               every cause with its evidence, the command that shows it, and what to do
    pipelinerl why results/x --json        the same as one JSON list

Reads the folder of a running or ended run and changes nothing in it. It exits with 1 if it found a cause, else with 0.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.errors import visible
from pipelinerl.inspect.ending import ending_findings, read_ending
from pipelinerl.inspect.finding import as_json, lines
from pipelinerl.inspect.reading import command_parser
from pipelinerl.inspect.why.attempts import causes
from pipelinerl.inspect.why.evidence import read_evidence


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("why", __doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--json", action="store_true", help="one JSON list")
    arguments = parser.parse_args(argv)
    run_dir: Path = arguments.run
    run = read_evidence(run_dir)
    found = [*ending_findings(read_ending(run_dir)), *causes(run)]
    silent = f"nothing looks wrong in {run_dir}: its metrics and {len(run.attempts)} of its attempts were looked at"
    if arguments.json:
        print(json.dumps(as_json(found, run_dir), indent=2))
    else:
        print(visible("\n".join(lines(found, run_dir) or [silent])))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
