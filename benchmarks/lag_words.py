"""How stale may the data be? The recipe `words` under several bounds of the lag, one run after the other.

    make smollm2
    python -m benchmarks.lag_words results/lag_words --json benchmarks/lag_words.json --figure docs/lag_words.png

Loss and corrections are those of `base`. Every bound is a run in a folder of its own. The same command goes on with an
interrupted run, and repeats none that the JSON file has. A recorded run's models (2 GB) are deleted. `seconds` are the
trainer's, without the time between two starts. A bound is only reached where generation is ahead of training, so the
trainer computes every layer again in the backward pass (`gradient_checkpointing`). A step takes 32 rollouts.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit, machine
from benchmarks.recipe import record
from examples.words.words import figures
from pipelinerl.config.paths import CHECKPOINTS, EXPORTS
from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.streams import set_streams_backend

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = (0, 2, 8, 16)
SETTINGS = (
    "finetune.keep_checkpoints=1",
    "finetune.keep_exports=1",
    "eval_every_n_versions=0",  # an evaluation takes the server's time
    "eval.at_start=false",
    "eval.at_end=false",
    "finetune.gradient_checkpointing=true",
    "finetune.gradient_accumulation_passes=32",
)
SMOOTHED = 5
"""Steps of a point of the curves. The reward of one step scatters by .05."""


def train(folder: Path, bound: int, overrides: Sequence[str]) -> None:
    """Begins a run, or goes on with it."""
    argv = [sys.executable, "-m", "pipelinerl.launch", "--config-name=words", f"output_dir={folder}"]
    subprocess.run([*argv, f"max_lag_steps={bound}", *overrides], cwd=ROOT, check=True)


def smoothed(values: Sequence[float | None]) -> list[float]:
    """Means of `SMOOTHED` values each. None: the step has none."""
    parts = [values[first : first + SMOOTHED] for first in range(0, len(values), SMOOTHED)]
    known = [[value for value in part if value is not None] for part in parts]
    return [sum(part) / len(part) if part else float("nan") for part in known]


def draw(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Five panels, one line per bound."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def steps(training: Mapping[str, Sequence[float]]) -> Sequence[float]:
        return range(1, len(training["seconds"]) + 1)

    def minutes(training: Mapping[str, Sequence[float]]) -> Sequence[float]:
        return [second / 60 for second in training["seconds"]]

    panels: tuple[tuple[str, str, str, Callable[[Mapping[str, Any]], Sequence[float]]], ...] = (
        ("reward", TrainerMetric.REWARD, "optimizer step", steps),
        ("reward", TrainerMetric.REWARD, "minutes", minutes),
        ("effective sample size", TrainerMetric.ESS, "optimizer step", steps),
        ("KL of sampler and trainer, nats per token", TrainerMetric.KL_K3, "optimizer step", steps),
        ("mean lag of a token, steps", TrainerMetric.LAG_MEAN, "optimizer step", steps),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), layout="constrained")
    for axis, (title, metric, below, across) in zip(axes, panels, strict=True):
        for bound, run in runs.items():
            training = run["training"]
            axis.plot(smoothed(across(training)), smoothed(training[metric]), label=f"max_lag_steps {bound}")
        axis.set(title=title, xlabel=below)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path, required=True)
    parser.add_argument("--bounds", type=int, nargs="+", default=BOUNDS)
    parser.add_argument("--steps", type=int, default=75, help="of every run")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of every run")
    args = parser.parse_args()
    set_streams_backend("files")
    settings = [f"finetune.max_train_steps={args.steps}", *SETTINGS, *args.set]
    found: dict[str, Any] = {}
    if args.json.exists():
        known = json.loads(args.json.read_text(encoding="utf-8"))
        if known["set"] != settings:
            parser.error(f"{args.json} is of other settings, {known['set']}; name another file")
        found = known["bounds"]
    for bound in args.bounds:
        if str(bound) not in found:
            run, source = (args.folder / str(bound)).resolve(), {"machine": machine(), "commit": commit()}
            train(run, bound, settings)
            found[str(bound)] = source | record(run, figures)
            found = dict(sorted(found.items(), key=lambda of_bound: int(of_bound[0])))
            result = {"set": settings, "bounds": found}
            args.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            for models in (CHECKPOINTS, EXPORTS):
                shutil.rmtree(run / models, ignore_errors=True)
        draw(args.figure, found)


if __name__ == "__main__":
    main()
