"""Where the seconds of a short run go: `python -m benchmarks.startup [--runs 2] [--json startup.json]`.

Runs the quickstart from an empty folder, again and again, and reports per run: `phases` of its `summary.json`, wall
seconds of the command from its start to its exit, CPU seconds of every process in every phase, milliseconds of an
optimizer step by cause, and the machine's load before. The first run may find cold caches, the others do not. A busy
machine shows in wall seconds; compare CPU seconds there. `imports_s` has, for each role, the seconds of its imports by
the package whose files they are (`-X importtime`), after the runs. `--runs 0` measures them alone.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from pipelinerl.config.environment import ROLE_VARIABLE

POLL_S = 0.25
MIN_CPU_S = 0.2
"""Processes that take less in a phase are left out of its table."""
STEP_PARTS = ("wait_s", "step_s", "push_wait_s")
IMPORTED = {
    "actor_0": "pipelinerl.actor.role",
    "actor_llm_0": "pipelinerl.inference.server",
    "finetune_0": "pipelinerl.finetune.loop",
    "preprocessor_0": "pipelinerl.preprocess.loop",
}
"""The module with all that a role imports before it begins."""
MIN_IMPORT_S = 0.2
"""Packages that take less in every role are `other`."""

Sample = tuple[float, Mapping[str, float]]
"""Seconds since the start of the command, and CPU seconds until then by process."""


def one_run(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """One start to finish in `folder`."""
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "pipelinerl.launch", *arguments, f"output_dir={folder}"]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    cpu: dict[int, tuple[str, float]] = {}
    samples: list[Sample] = [(0.0, {})]
    while process.poll() is None:
        cpu |= cpu_seconds(process.pid)
        samples.append((time.monotonic() - started, by_name(cpu)))
        time.sleep(POLL_S)
    wall_s = time.monotonic() - started
    assert process.returncode == 0, f"the run in {folder} failed"
    summary = json.loads((folder / "summary.json").read_text())
    points = [json.loads(line) for line in (folder / "metrics" / "finetune.jsonl").read_text().splitlines()]
    kept = ("success_before", "success_after", "training_s", "wall_s")
    return {
        "load_before": round(load, 2),
        "command_s": round(wall_s, 1),
        "cpu_s": round(sum(samples[-1][1].values()), 1),
        "cpu_s_of": cpu_of_phases(summary["phases"], samples),
        "phases": summary["phases"],
        "step_ms": step_ms(points),
        **{name: summary[name] for name in kept},
    }


def cpu_seconds(launcher: int) -> dict[int, tuple[str, float]]:
    """(name, CPU seconds until now) of every process of the run, by pid."""
    found = {}
    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        try:
            role = process.environ().get(ROLE_VARIABLE, "/launcher").rpartition("/")[2]
            times = process.cpu_times()
            found[process.pid] = (role + part_of_role(process.cmdline()), times.user + times.system)
        except psutil.Error:
            continue
    return found


def part_of_role(arguments: Sequence[str]) -> str:
    """The suffix that tells a role's own process from those that it starts."""
    line = " ".join(arguments)
    if "EngineCore" in line:
        return ".engine"
    return ".worker" if "spawn_main" in line else ""


def by_name(cpu: Mapping[int, tuple[str, float]]) -> dict[str, float]:
    """CPU seconds of all processes of one name together."""
    sums: dict[str, float] = {}
    for name, seconds in cpu.values():
        sums[name] = sums.get(name, 0.0) + seconds
    return sums


def cpu_of_phases(phases: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """CPU seconds of every process in every phase.

    Args:
        phases: seconds of each phase, in order from the start of the command; `ready` is ignored.
        samples: of the whole run.
    """
    ends, names = [0.0], [name for name in phases if name != "ready"]
    for name in names:
        ends.append(ends[-1] + phases[name])
    table = {}
    for name, (begin, end) in zip(names, pairwise(ends), strict=True):
        before, after = cpu_until(begin, samples), cpu_until(end, samples)
        spent = {process: round(after[process] - before.get(process, 0.0), 1) for process in sorted(after)}
        table[name] = {process: seconds for process, seconds in spent.items() if seconds >= MIN_CPU_S}
    return table


def cpu_until(seconds: float, samples: Sequence[Sample]) -> Mapping[str, float]:
    """CPU seconds by process in the last sample that was taken before."""
    return max((sample for sample in samples if sample[0] <= seconds), key=lambda sample: sample[0])[1]


def step_ms(points: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and median milliseconds of an optimizer step by cause; `other` is what no cause explains.

    Args:
        points: the trainer's metrics, one of each step, with the Unix `time` at its end.
    """
    parts: dict[str, list[float]] = {name.removesuffix("_s"): [] for name in (*STEP_PARTS, "other", "whole")}
    for earlier, point in pairwise(points):
        whole = point["time"] - earlier["time"]
        known = {name: point[name] for name in STEP_PARTS}
        for name, value in {**known, "other": whole - sum(known.values()), "whole": whole}.items():
            parts[name.removesuffix("_s")].append(1e3 * value)
    return {
        name: {"mean": round(statistics.fmean(values), 1), "median": round(statistics.median(values), 1)}
        for name, values in parts.items()
    }


def imports_s() -> dict[str, dict[str, float]]:
    """Seconds of each role's imports by package."""
    sums = {}
    for role, module in IMPORTED.items():
        command = [sys.executable, "-X", "importtime", "-c", f"import gc; gc.disable(); import {module}"]
        sums[role] = by_package(subprocess.run(command, capture_output=True, text=True, check=True).stderr)
    named = sorted({name for one in sums.values() for name, seconds in one.items() if seconds >= MIN_IMPORT_S})
    return {
        role: {name: round(one.get(name, 0.0), 2) for name in named}
        | {"other": round(sum(seconds for name, seconds in one.items() if name not in named), 2)}
        for role, one in sums.items()
    }


def by_package(printed: str) -> dict[str, float]:
    """Seconds of modules without those that they import, by package; `python` has the standard library.

    Args:
        printed: by `-X importtime`, a line `import time: own µs | cumulative µs | module` of each module.
    """
    sums: dict[str, float] = {}
    for own, module in re.findall(r"^import time: +(\d+) \| +\d+ \| +([\w.]+)$", printed, re.MULTILINE):
        package = module.partition(".")[0]
        name = "python" if package in sys.stdlib_module_names else package
        sums[name] = sums.get(name, 0.0) + int(own) / 1e6
    return sums


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
    result = {"cores": os.cpu_count(), "imports_s": imports_s(), "runs": runs}
    print(json.dumps(result["imports_s"], indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
