"""Where the seconds of a short run go: `python -m benchmarks.startup [--runs 2] [--json startup.json]`.

Runs the quickstart from an empty folder, again and again, and reports per run: `phases` of its `summary.json`, wall
seconds of the command from its start to its exit, CPU seconds of every role, and the machine's load before. The first
run may find cold caches, the others do not. A busy machine shows in wall seconds; compare CPU seconds there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from pipelinerl.config.environment import ROLE_VARIABLE

POLL_S = 0.5


def one_run(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """One start to finish in `folder`."""
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "pipelinerl.launch", *arguments, f"output_dir={folder}"]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    cpu: dict[int, tuple[str, float]] = {}
    while process.poll() is None:
        cpu |= cpu_seconds(process.pid)
        time.sleep(POLL_S)
    wall_s = time.monotonic() - started
    assert process.returncode == 0, f"the run in {folder} failed"
    summary = json.loads((folder / "summary.json").read_text())
    roles: dict[str, float] = {}
    for role, seconds in cpu.values():
        roles[role] = round(roles.get(role, 0.0) + seconds, 1)
    kept = ("success_before", "success_after", "training_s", "wall_s")
    return {
        "load_before": round(load, 2),
        "command_s": round(wall_s, 1),
        "cpu_s": round(sum(roles.values()), 1),
        "cpu_s_of": dict(sorted(roles.items())),
        "phases": summary["phases"],
        **{name: summary[name] for name in kept},
    }


def cpu_seconds(launcher: int) -> dict[int, tuple[str, float]]:
    """(role, CPU seconds until now) of every process of the run, by pid."""
    found = {}
    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        try:
            role = process.environ().get(ROLE_VARIABLE, "/launcher").rpartition("/")[2]
            times = process.cpu_times()
            found[process.pid] = (role, times.user + times.system)
        except psutil.Error:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--config-name", default="quickstart")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("overrides", nargs="*", help="key=value, as for the launcher")
    options = parser.parse_args()
    runs = []
    for number in range(options.runs):
        with tempfile.TemporaryDirectory(prefix="startup-") as folder:
            arguments = [f"--config-name={options.config_name}", "seed=0", *options.overrides]
            runs.append(one_run(Path(folder) / "run", arguments))
        print(f"run {number + 1}: {json.dumps(runs[-1])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
