"""Does a run learn the same with shared prefixes? `words` and `quickstart`, with and without, in pairs of equal seeds.

    python -m pipelinerl.launch --config-name=words seed=1 output_dir=results/w1
    python -m pipelinerl.launch --config-name=words seed=1 output_dir=results/w1_off finetune.share_prefixes=off
    python -m benchmarks.shared_learning results/w1 results/w1_off --steps 40 --json benchmarks/shared_learning.json

Both may have gone further. Per run: means of the training reward in each quarter of the steps, the last evaluation on
held-out problems, the trainer's median seconds per step after the first, the smallest effective sample size, and the
tokens' mean lag. With `schedule=conventional max_lag_steps=0` the lag is 0 on both sides, so they train on data of the
same age. The runs are added to those that the file has.
"""

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit, machine
from benchmarks.recipe import no_figures, record, rounded
from pipelinerl.config.load import load_old_run
from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.streams import set_streams_backend


def beginning(run_dir: Path, steps: int) -> dict[str, Any]:
    """What a run did in its first steps."""
    run, config = record(run_dir, no_figures), load_old_run(run_dir)
    training = {name: values[:steps] for name, values in run["training"].items()}
    seconds = training["seconds"]
    reward = training[TrainerMetric.REWARD]
    quarter = steps // 4
    quarters = {
        f"reward of quarter {at + 1}": rounded(statistics.fmean(reward[at * quarter : (at + 1) * quarter]))
        for at in range(4)
    }
    last = [e for e in run["evaluations"] if e["step"] <= steps][-1]
    return {
        "task": config.dataset_loader,
        "schedule": config.schedule,
        "seed": run["seed"],
        "share_prefixes": config.finetune.share_prefixes,
        "steps": steps,
        **quarters,
        "evaluated at step": last["step"],
        "held-out reward": last["reward"],
        "seconds per step": rounded(statistics.median(later - earlier for earlier, later in pairwise(seconds))),
        "ess": rounded(min(training[TrainerMetric.ESS])),
        "mean lag": rounded(statistics.fmean(training[TrainerMetric.LAG_MEAN])),
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
    known = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {"note": "", "runs": []}
    at = args.commit or commit()
    runs = [*known["runs"], *(beginning(run_dir, args.steps) | {"commit": at} for run_dir in args.runs)]
    document = {"machine": machine(), "note": args.note or known["note"], "runs": runs}
    args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
