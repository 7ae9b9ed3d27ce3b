"""Another trainer on the same work: TRL's synchronous `GRPOTrainer` and this project, one after the other.

    make install EXTRAS=cpu,test,peers
    python -m benchmarks.peers --task quickstart --steps 160 --json benchmarks/peers.json
    python -m benchmarks.peers --task words --steps 60 --every 10 --target 0.35 --peer-passes 4 --json FILE

Both train the model, problems and rewards of one shipped configuration, with its batch, attempts, learning rate and
betas, in float32 on two cores: ours as its users run it, the peer with two threads, generation by transformers, its own
loss (DAPO, where ours is REINFORCE with the mean of the other attempts) and its own warm-up, whose first step has a
learning rate of 0. Its settings are in the result. Saving weights stops the peer's clock and not ours. The order of the
two alternates with the seed. Neither evaluates while it trains. Weights are kept every `--every` steps, and the
held-out figure is computed from them afterwards, by the same code. `--set` is for both, e.g. longer answers.
`--conventional` runs ours with `schedule=conventional`, too. A seed that FILE has is not repeated. `words` needs `make
smollm2`.

- `start_s`: from the command to the beginning of training: imports, model, server.
- `step_s`: seconds per optimizer step, median; `training_s`: of all steps.
- `to_success_s`, `to_reward_s`: training time until a kept model reaches `--target`; null = none did.
- `generation_core_s` g, `training_core_s` t: CPU seconds of a step. Ours: t is the trainer's process, g all others'.
- `both_cores_busy_s`: (g + t) / 2, what a step would take if it alternated with both cores always busy.
- `allowed_ratio`: the peer's (g + t) / 2 over our max(g, t), since each of our sides has one core.
- `peak_gib`: memory of all processes together, shared pages counted once.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.peers_task import load_task
from benchmarks.provenance import commit, machine
from benchmarks.startup import cpu_seconds
from pipelinerl.inspect.reading import look_into
from pipelinerl.inspect.report import last_per_step, read_records
from pipelinerl.records import WeightUpdateSuccess
from pipelinerl.tiny_model import build

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 4 * 3600
"""100 steps of `words` take one."""
POLL_S, POLLS_PER_MEMORY = 1.0, 10
"""Counting the pages of gigabytes takes time of the cores that are measured."""


@dataclass
class Child:
    """A command that has ended."""

    began: float
    """In seconds since the epoch."""
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    """(seconds since the epoch, CPU seconds so far of the trainer's processes, and of all others)"""
    peak_bytes: int = 0

    def watch(self, pid: int, is_over: threading.Event) -> None:
        spent: dict[int, tuple[str, float]] = {}
        while not is_over.wait(POLL_S):
            try:
                spent |= cpu_seconds(pid)
                if len(self.samples) % POLLS_PER_MEMORY == 0:
                    self.peak_bytes = max(self.peak_bytes, resident_bytes(pid))
            except psutil.Error:  # a process has ended meanwhile
                continue
            trainer = sum(seconds for name, seconds in spent.values() if name.startswith("finetune"))
            others = sum(seconds for _, seconds in spent.values()) - trainer
            self.samples.append((time.time(), trainer, others))

    def cpu_between(self, first_s: float, last_s: float) -> tuple[float, float]:
        """CPU seconds of the trainer's processes and of all others between two times since the beginning."""
        at_S, trainer_S, others_S = np.array(self.samples).T
        ends = np.array([first_s, last_s]) + self.began
        trainer, others = (float(np.diff(np.interp(ends, at_S, spent_S))[0]) for spent_S in (trainer_S, others_S))
        return trainer, others


def resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants. A page that several have counts once."""
    parent = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in [parent, *parent.children(recursive=True)])


def run_child(argv: list[str], log: Path) -> Child:
    """Runs a command to its end."""
    child, is_over = Child(time.time()), threading.Event()
    with log.open("w") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    watcher = threading.Thread(target=child.watch, args=(process.pid, is_over))
    watcher.start()
    try:
        status = process.wait(timeout=TIMEOUT_S)
    finally:
        is_over.set()
        watcher.join()
        process.kill()
    if status:
        raise SystemExit(f"{' '.join(argv[:4])} ended with {status}:\n{log.read_text()[-3000:]}")
    return child


def run_ours(args: argparse.Namespace, seed: int, model: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """Start-up and the end of every optimizer step, in seconds since the command."""
    run = folder / "run"
    argv = [sys.executable, "-m", "pipelinerl.launch", f"--config-name={args.task}", f"output_dir={run}"]
    argv += [f"model_path={model}", f"seed={seed}", "test_dataset_names=[]", *args.set, *overrides]
    argv += [f"finetune.max_train_steps={args.steps}", f"finetune.save_checkpoint_steps={args.every}"]
    child = run_child(argv, folder / "log.txt")
    with look_into(run):
        records = read_records(run)
    served = min(m.timestamp for m in records.trainer if isinstance(m, WeightUpdateSuccess)) - child.began
    steps_s = [step.timestamp - child.began for step in last_per_step(records.trainer)]
    training, others = child.cpu_between(served, steps_s[-1])
    return {
        "training_began_s": served,
        "steps_s": steps_s,
        "generation_core_s": others / args.steps,
        "training_core_s": training / args.steps,
        "peak_gib": child.peak_bytes / 2**30,
        "snapshots": run / "exports",
    }


def run_conventional(args: argparse.Namespace, seed: int, model: Path, folder: Path) -> dict[str, Any]:
    return run_ours(args, seed, model, folder, "schedule=conventional", "max_lag_steps=0")


def run_peer(args: argparse.Namespace, seed: int, model: Path, folder: Path) -> dict[str, Any]:
    job = {
        "task": args.task,
        "overrides": args.set,
        "seed": seed,
        "model": str(model),
        "steps": args.steps,
        "threads": 2,
        "peer_passes": args.peer_passes,
        "snapshot_every": args.every,
        "folder": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job))
    child = run_child([sys.executable, "-m", "benchmarks.peers_trl", str(folder / "job.json")], folder / "log.txt")
    memory = {"peak_gib": child.peak_bytes / 2**30, "snapshots": folder}
    return json.loads((folder / "peer.json").read_text()) | memory


def figures(raw: dict[str, Any], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What is reported of one run."""
    ends = [end - raw["training_began_s"] for end in raw["steps_s"]]
    task = load_task(args.task, seed, args.set)
    kept = range(args.every, args.steps + 1, args.every)
    curve = [(step, ends[step - 1], task.held_out(raw["snapshots"] / f"step_{step}", task)) for step in kept]
    cores = [raw["generation_core_s"], raw["training_core_s"]]
    return {
        "seed": seed,
        "start_s": raw["training_began_s"],
        "training_s": ends[-1],
        "step_s": statistics.median(later - earlier for earlier, later in pairwise(ends)),
        "generation_core_s": cores[0],
        "training_core_s": cores[1],
        "both_cores_busy_s": sum(cores) / 2,
        "peak_gib": raw["peak_gib"],
        task.measure: curve[-1][2],
        f"to_{task.measure}_s": next((at for _, at, seen in curve if seen >= args.target), None),
        "curve": [{"step": step, "training_s": at, task.measure: seen} for step, at, seen in curve],
        **{name: raw[name] for name in ("settings", "defaults", "mean_tokens") if name in raw},
    }


def measure(args: argparse.Namespace, seed: int, scratch: Path) -> dict[str, Any]:
    settings = load_task(args.task, seed, args.set).settings
    tiny, model = settings["tiny_model"], Path(settings["model_path"]).absolute()
    if tiny:
        model = build(scratch / f"model_{seed}", tiny["recipe"], seed, tiny["params"])
    result: dict[str, Any] = {"machine": machine(), "commit": commit(), "trl_version": version("trl")}
    runs = {"ours": run_ours, "trl": run_peer}
    order = [*runs] if seed % 2 == 0 else [*runs][::-1]
    if args.conventional:
        runs["conventional"] = run_conventional
        order.append("conventional")
    for name in order:
        folder = scratch / f"{name}_{seed}"
        folder.mkdir()
        result[name] = figures(runs[name](args, seed, model, folder), args, seed) | {"load": os.getloadavg()[0]}
        kept = ("curve", "settings", "defaults")
        print(
            name, seed, json.dumps({key: value for key, value in result[name].items() if key not in kept}), flush=True
        )
        shutil.rmtree(folder)
    ours, peer = result["ours"], result["trl"]
    allowed = peer["both_cores_busy_s"] / max(ours["generation_core_s"], ours["training_core_s"])
    return result | {"allowed_ratio": allowed}


def summed_up(settings: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of all seeds. A ratio is null if a side did not reach the target with every seed."""
    names = ("step_s", "training_s", f"to_{load_task(settings['task'], 0).measure}_s")
    known = [name for name in names if all(run[side][name] for run in runs for side in ("ours", "trl"))]
    medians = {name: statistics.median(run["trl"][name] / run["ours"][name] for run in runs) for name in known}
    return settings | {"trl_over_ours": dict.fromkeys(names) | medians, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["quickstart", "words"], default="quickstart")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=20, help="steps between kept models")
    parser.add_argument("--target", type=float, default=0.75, help="held-out success or reward to reach")
    parser.add_argument("--peer-passes", type=int, default=1, help="micro-batches of the peer's step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the configuration, for both")
    parser.add_argument("--conventional", action="store_true", help="run ours with schedule=conventional, too")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("task", "steps", "every", "target", "set")}
    runs: list[dict[str, Any]] = []
    if args.json.exists():
        found = json.loads(args.json.read_text())
        runs = found["runs"]
        if others := {name: found[name] for name in settings if found[name] != settings[name]}:
            parser.error(f"{args.json} was measured with {others}: name another file")
    for seed in args.seeds:
        if all(run["ours"]["seed"] != seed for run in runs):
            with tempfile.TemporaryDirectory() as scratch:
                runs.append(measure(args, seed, Path(scratch)))
            args.json.write_text(json.dumps(summed_up(settings, runs), indent=1) + "\n")
    print(json.dumps(summed_up(settings, runs)["trl_over_ours"]))


if __name__ == "__main__":
    main()
