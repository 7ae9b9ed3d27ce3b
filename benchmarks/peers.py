"""Another trainer on the same work: TRL's synchronous `GRPOTrainer` and this project, one after the other.

    make install EXTRAS=cpu,test,peers
    python -m benchmarks.peers --task quickstart --steps 160 --json benchmarks/peers.json

Both train the model, problems and rewards of one shipped configuration, with its batch, attempts, learning rate and
betas, in float32 on two cores: ours as its users run it, the peer with two threads and its own defaults elsewhere (its
settings are in the result). The order of the two alternates with the seed. Neither evaluates while it trains. Weights
are kept every `--every` steps, and held-out success is computed from them afterwards, exactly and by the same code.

- `start_s`: from the command to the beginning of training: imports, model, server.
- `step_s`: seconds per optimizer step, median; `training_s`: of all steps.
- `to_success_s`: training time until a kept model reaches `--target`; null = none did.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers_task import held_out_success, load_task
from benchmarks.provenance import commit, machine
from pipelinerl.inspect.reading import look_into
from pipelinerl.inspect.report import last_per_step, read_records
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import WeightUpdateSuccess
from pipelinerl.tiny_model import build

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 3600


def run_child(argv: list[str], log: Path) -> float:
    """Runs a command to its end; returns when it began, in seconds since the epoch."""
    began = time.time()
    with log.open("w") as output:
        done = subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[:4])} ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    return began


def run_ours(args: argparse.Namespace, seed: int, model: Path, folder: Path) -> dict[str, Any]:
    """Start-up and the end of every optimizer step, in seconds since the command."""
    run = folder / "run"
    argv = [sys.executable, "-m", "pipelinerl.launch", f"--config-name={args.task}", f"output_dir={run}"]
    argv += [f"model_path={model}", f"seed={seed}", "test_dataset_names=[]"]
    argv += [f"finetune.max_train_steps={args.steps}", f"finetune.save_checkpoint_steps={args.every}"]
    began = run_child(argv, folder / "log.txt")
    with look_into(run):
        records = read_records(run)
    served = min(m.timestamp for m in records.trainer if isinstance(m, WeightUpdateSuccess))
    return {
        "training_began_s": served - began,
        "steps_s": [step.timestamp - began for step in last_per_step(records.trainer)],
        "where": where_a_step_goes(run),
        "snapshots": run / "exports",
    }


def where_a_step_goes(run: Path) -> dict[str, float]:
    """Medians of the trainer's own times per step, in milliseconds."""
    points = read_metrics(run, "finetune")
    names = sorted({name for point in points for name in point if name.endswith("_s") and name != "tokens_per_s"})
    known = {name: [point[name] for point in points if point.get(name) is not None] for name in names}
    return {name: round(1000 * statistics.median(values), 2) for name, values in known.items() if values}


def run_peer(args: argparse.Namespace, seed: int, model: Path, folder: Path) -> dict[str, Any]:
    job = {
        "task": args.task,
        "seed": seed,
        "model": str(model),
        "steps": args.steps,
        "threads": 2,
        "peer_passes": args.peer_passes,
        "snapshot_every": args.every,
        "folder": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job))
    run_child([sys.executable, "-m", "benchmarks.peers_trl", str(folder / "job.json")], folder / "log.txt")
    return json.loads((folder / "peer.json").read_text()) | {"snapshots": folder}


def figures(raw: dict[str, Any], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What is reported of one run."""
    ends = [end - raw["training_began_s"] for end in raw["steps_s"]]
    task = load_task(args.task, seed)
    kept = range(args.every, args.steps + 1, args.every)
    curve = [(step, ends[step - 1], held_out_success(raw["snapshots"] / f"step_{step}", task)) for step in kept]
    return {
        "seed": seed,
        "start_s": raw["training_began_s"],
        "training_s": ends[-1],
        "step_s": statistics.median(later - earlier for earlier, later in pairwise(ends)),
        "success": curve[-1][2],
        "to_success_s": next((at for _, at, success in curve if success >= args.target), None),
        "curve": [{"step": step, "training_s": at, "success": success} for step, at, success in curve],
        **{name: raw[name] for name in ("where", "settings", "defaults", "mean_tokens") if name in raw},
    }


def measure(args: argparse.Namespace, seed: int, scratch: Path) -> dict[str, Any]:
    tiny = load_task(args.task, seed).settings["tiny_model"]
    model = build(scratch / f"model_{seed}", tiny["recipe"], seed, tiny["params"])
    result: dict[str, Any] = {}
    runs = [("ours", run_ours), ("trl", run_peer)]
    for name, run in runs if seed % 2 == 0 else runs[::-1]:
        folder = scratch / f"{name}_{seed}"
        folder.mkdir()
        result[name] = figures(run(args, seed, model, folder), args, seed) | {"load": os.getloadavg()[0]}
        shown = {key: result[name][key] for key in ("start_s", "training_s", "step_s", "success", "to_success_s")}
        print(name, seed, json.dumps(shown), flush=True)
        shutil.rmtree(folder)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["quickstart"], default="quickstart")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=20, help="steps between kept models")
    parser.add_argument("--target", type=float, default=0.75, help="held-out success to reach")
    parser.add_argument("--peer-passes", type=int, default=1, help="micro-batches of the peer's step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [measure(args, seed, Path(scratch)) for seed in args.seeds]
    ratios = {
        name: [run["trl"][name] / run["ours"][name] for run in runs if run["trl"][name] and run["ours"][name]]
        for name in ("step_s", "training_s", "to_success_s")
    }
    result = {
        "machine": machine(),
        "commit": commit(),
        "trl": version("trl"),
        "task": args.task,
        "steps": args.steps,
        "target": args.target,
        "trl_over_ours": {name: statistics.median(values) if values else None for name, values in ratios.items()},
        "runs": runs,
    }
    print(json.dumps(result["trl_over_ours"]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
