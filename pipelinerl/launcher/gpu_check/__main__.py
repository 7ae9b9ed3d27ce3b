"""`pipelinerl gpu-check`: does this machine's GPU do what the plan says?

    pipelinerl gpu-check                        # about ten minutes, no network
    pipelinerl gpu-check --limit-s 1800 --out results/h100
    pipelinerl gpu-check --model models/SmolLM2-135M-Instruct    # serves it, and ends with a curve of `words`
    pipelinerl gpu-check --rehearse             # the same checks on the CPU with a tiny model
    pipelinerl gpu-check --only serving --set +vllm_config.vllm_kwargs.attention-backend=TRITON_ATTN

Writes FILE.txt, one page, and FILE.json, everything that was measured: paste the first into an issue, and attach the
second. Both are written again after each check, so that a check that takes the machine down costs only itself. Checks
for which no time is left are named. Ends with 1 if a check failed, and with 2 where there is no CUDA device.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.inspect.finding import Finding, Level, as_json
from pipelinerl.inspect.reading import command_parser
from pipelinerl.launcher.gpu_check.checks import CHECKS, OFFLINE, GpuCheck, find_machine
from pipelinerl.launcher.gpu_check.machine import Machine
from pipelinerl.launcher.gpu_check.verdicts import Facts, failed, judge_imports

LIMIT_S = 600
"""The command promises ten minutes. Checks for which no time is left are named."""
IMPORTS_LIMIT_S = 120
"""The first import of torch and vLLM on a machine compiles their Python files, from a slow disk perhaps."""
LEAST_S = 20
"""With less time left no check is started: most of it would go to the imports of torch and vLLM."""
PAGE_WIDTH = 132
"""Columns of the page, for a wide terminal or an issue."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("gpu-check", __doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="FILE", help="without its ending")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all checks together")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], help="these checks")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders here")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a pretrained model for the runs")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU: shows that the checks run")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="options of the runs")
    args = parser.parse_args(argv)
    os.environ.update(OFFLINE)
    started = time.monotonic()
    machine, imports = find_machine("cpu" if args.rehearse else "cuda", IMPORTS_LIMIT_S)
    if machine is None:
        print(f"gpu-check: {imports['problem']}, so there is nothing to check; --rehearse needs none", file=sys.stderr)
        return EXIT_REFUSED
    model = "" if args.model is None else str(args.model.resolve())
    machine = msgspec.structs.replace(machine, overrides=tuple(args.set), model=model)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [check for check in CHECKS if args.only is None or check.name in args.only]
    facts: dict[str, Facts] = {"imports": imports}
    found = judge_imports(imports)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        for check in chosen:
            left = started + args.limit_s - time.monotonic()
            facts[check.name] = run_check(check, machine, args.keep or Path(scratch), left)
            found += verdicts_of(check, machine, facts[check.name])
            write_results(args.out, machine, found, facts, time.monotonic() - started)
    print(args.out.with_suffix(".txt").read_text(encoding="utf-8"), end="")
    return int(any(finding.level is Level.FAILED for finding in found))


def run_check(check: GpuCheck, machine: Machine, folder: Path, left_s: float) -> Facts:
    """The facts of one check, and the seconds that it took."""
    if machine.devices < check.needs_devices:
        return {"not_run": f"needs {check.needs_devices} devices, this machine has {machine.devices}"}
    if left_s < LEAST_S:
        return {"not_run": "no time was left: raise --limit-s"}
    own = folder / check.name.replace(", ", "-").replace(" ", "-")
    own.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    facts = dict(check.facts(machine, own, left_s if machine.is_rehearsal else min(left_s, check.limit_s)))
    return facts | {"seconds": round(time.monotonic() - started, 1)}


def verdicts_of(check: GpuCheck, machine: Machine, facts: Facts) -> list[Finding]:
    ended = failed(check.name, facts)
    return check.judge(machine, facts) if ended is None else [ended]


def write_results(
    out: Path, machine: Machine, found: Sequence[Finding], facts: dict[str, Facts], seconds: float
) -> None:
    """Write the page and the JSON file."""
    everything: dict[str, Any] = {
        "machine": msgspec.to_builtins(machine),
        "rehearsal": machine.is_rehearsal,
        "seconds": round(seconds, 1),
        "verdicts": as_json(found),
        "facts": facts,
    }
    out.with_suffix(".json").write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")
    with out.with_suffix(".txt").open("w", encoding="utf-8") as file:
        print_page(Console(file=file, width=PAGE_WIDTH), machine, found, seconds)


def print_page(console: Console, machine: Machine, found: Sequence[Finding], seconds: float) -> None:
    kind = "REHEARSAL on the CPU: no figure says anything about a GPU" if machine.is_rehearsal else machine.name
    memory = f"{machine.devices} × {machine.memory_bytes / 2**30:.0f} GiB"
    counts = ", ".join(
        f"{sum(finding.level is level for finding in found)} {level.word}"
        for level in dict.fromkeys(finding.level for finding in found)
    )
    console.print(f"pipelinerl gpu-check: {kind} ({memory}) {machine.architecture}, {seconds:.0f} s: {counts}")
    table = Table(box=None, pad_edge=False)
    for column in ("check", "verdict", "measured"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(finding.title, finding.level.word, finding.evidence)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
