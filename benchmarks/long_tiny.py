"""Answers that live through weight updates, learned three times over.

    python -m benchmarks.long_tiny --json benchmarks/long_tiny.json [--seeds 0 1 2] [key=value …]

Runs `--config-name=long_tiny` once per seed, each in an empty folder, and keeps what its `summary.json` says. The
model's warm-up comes from the cache where there is one (`PIPELINERL_CACHE`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit, machine

ROOT = Path(__file__).resolve().parents[1]
KEPT = (
    "success_before",
    "success_after",
    "optimizer_steps",
    "weight_updates",
    "rollouts",
    "tokens_in_one_rollout",
    "versions_in_one_rollout_median",
    "versions_in_one_rollout_max",
    "lag_steps",
    "tokens_generated_per_s",
    "training_s",
    "wall_s",
    "phases",
)


def one_run(folder: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    load = round(os.getloadavg()[0], 2)
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=long_tiny", f"seed={seed}"]
    started = time.monotonic()
    subprocess.run([*command, f"output_dir={folder}", *overrides], check=True, cwd=ROOT)
    summary = json.loads((folder / "summary.json").read_text())
    command_s = round(time.monotonic() - started, 1)
    return {"seed": seed, "load_before": load, "command_s": command_s, **{name: summary[name] for name in KEPT}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="key=value, as for the launcher")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(one_run(Path(folder) / "run", seed, args.overrides))
        gains = [run["success_after"] - run["success_before"] for run in runs]
        document = {
            "machine": machine(),
            "commit": commit(),
            "overrides": args.overrides,
            "gain_mean": round(statistics.mean(gains), 3),
            "runs": runs,
        }
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
