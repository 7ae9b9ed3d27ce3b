"""Does a run learn the same with shared prefixes? The recipe `words`, with and without, in pairs of equal seeds.

    python -m pipelinerl.launch --config-name=words seed=1 output_dir=results/w1
    python -m pipelinerl.launch --config-name=words seed=1 output_dir=results/w1_off finetune.share_prefixes=off
    python -m benchmarks.shared_learning results/w1 results/w1_off --steps 40 --json benchmarks/shared_learning.json

Both may have gone further. Per run: means of ten steps of the training reward, the last evaluation on held-out
problems, the trainer's median seconds per step, and the smallest effective sample size.
"""

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit, machine
from benchmarks.recipe import record, rounded
from examples.words.words import figures
from pipelinerl.config.load import load_old_run
from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.streams import set_streams_backend

WINDOW = 10
"""Steps. The reward of one step scatters by .05."""


def beginning(run_dir: Path, steps: int) -> dict[str, Any]:
    """What a run did in its first steps."""
    run = record(run_dir, figures)
    training = {name: values[:steps] for name, values in run["training"].items()}
    seconds = [0.0, *training["seconds"]]
    reward = training[TrainerMetric.REWARD]
    windows = {
        f"reward of steps {at + 1} to {at + WINDOW}": rounded(statistics.fmean(reward[at : at + WINDOW]))
        for at in range(0, len(reward), WINDOW)
    }
    last = [e for e in run["evaluations"] if e["step"] <= steps][-1]
    return {
        "seed": run["seed"],
        "share_prefixes": load_old_run(run_dir).finetune.share_prefixes,
        **windows,
        "evaluated at step": last["step"],
        "held-out reward": last["reward"],
        "seconds per step": rounded(statistics.median(later - earlier for earlier, later in pairwise(seconds))),
        "ess": rounded(min(training[TrainerMetric.ESS])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--commit", help="at which the runs were made; else the checkout's")
    parser.add_argument("--note", default="", help="what else the machine did, say")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    set_streams_backend("files")
    runs = [beginning(run_dir, args.steps) for run_dir in args.runs]
    document = {"machine": machine(), "commit": args.commit or commit(), "note": args.note, "runs": runs}
    args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
