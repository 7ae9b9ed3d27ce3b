"""Power cuts of a real run: each state that a cut leaves is resumed by the same command with real servers, to its end.

    python -m benchmarks.power_cuts --cuts 10 --json benchmarks/power_cuts.json

A quickstart runs whole. All its processes tell a recorder of every sync, rename and deletion (`tests/power_cut.py`
says which state a cut leaves). States are taken at seeded random events. The first of every three loses everything that
was not synced, the others keep a random part of it. The run folder is then rebuilt at its place, and the same command
resumes it. If the command refuses because records are lost, `resume=checkpoint` is added, as the message says.

A state passes if the run ends with exit 0, the ledger shows every optimizer step trained from distinct samples, nothing
is left behind, and at most two saves lie between the last step before the cut and the step that it resumes from.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recovery import SHORT, row
from benchmarks.struck_run import Outcome, run_struck
from tests.power_cut import Cut, Disk, recording_processes

SAVE_EVERY = 8
MEAN_EVENTS = 60
"""Between two states that are kept."""
REFUSED = "resume=checkpoint"


def record(run_dir: Path, overrides: Sequence[str], steps: int, seed: int) -> tuple[Disk, Outcome]:
    """Runs the quickstart whole; returns the states that were kept and the run's outcome."""
    rng = random.Random(seed)
    with recording_processes(run_dir, run_dir.parent / "recorder", lambda _: rng.random() < 1 / MEAN_EVENTS) as disk:
        return disk, run_struck(run_dir, [], overrides, steps=steps, timeout_s=1500)


def last_step(cut: Cut) -> int:
    """The last optimizer step before the cut."""
    folder = cut.present.get(cut.present.get(cut.root, {}).get("metrics", 0), {})
    lines = cut.written.get(folder.get("finetune.jsonl", 0), b"").split(b"\n")
    return max((json.loads(line)["step"] for line in lines[:-1]), default=0)


def resume(cut: Cut, run_dir: Path, overrides: Sequence[str], steps: int, seed: int | None) -> dict[str, Any]:
    """Rebuilds the state and resumes it; one line about it."""
    shutil.rmtree(run_dir, ignore_errors=True)
    cut.rebuild(run_dir, seed)
    reached, ways = last_step(cut), [[], ["resume=checkpoint"]]
    for way in ways:
        outcome = run_struck(run_dir, [], [*overrides, *way], steps=steps, timeout_s=1500)
        if outcome.exit_code == 0 or REFUSED not in outcome.output:
            break
    said = re.search(r"event=resumed step=(\d+) repeated=\d+", trainer_log(run_dir))
    start = int(said[1]) if said else 0
    if start < reached - 2 * SAVE_EVERY:
        outcome.problems.append(f"step {reached} was made, and it resumes from {start}")
    facts = {"event": cut.event, "unsynced": "lost" if seed is None else "random", "reached": reached, "start": start}
    return facts | {"by": "checkpoint" if way else "itself"} | row(outcome)


def trainer_log(run_dir: Path) -> str:
    path = run_dir / "finetune_0" / "log.txt"
    return path.read_text(errors="replace") if path.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=10, help="states to resume")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="power-cuts-"))
    overrides = [f"model_path={folder / 'model'}", *SHORT, "streams.segment_mb=1"]
    run_dir = folder / "run"
    disk, whole = record(run_dir, overrides, args.steps, args.seed)
    document = {
        "command": " ".join(["python -m benchmarks.power_cuts", *sys.argv[1:]]),
        "events": disk.events,
        "states": len(disk.cuts),
        "recorded_run": row(whole),
    }
    print(json.dumps(document), flush=True)
    os.rename(run_dir, folder / "recorded")
    results = []
    for number in range(min(args.cuts, len(disk.cuts))):
        cut = disk.cuts[(2 * number + 1) * len(disk.cuts) // (2 * args.cuts)]
        results.append(resume(cut, run_dir, overrides, args.steps, None if number % 3 == 0 else number))
        print(json.dumps(results[-1]), flush=True)
        if results[-1]["problems"]:
            os.rename(run_dir, folder / f"cut{number}")
        if args.json:
            passed = sum(result["passed"] for result in results)
            whole_document = document | {"resumed": len(results), "passed": passed, "results": results}
            args.json.write_text(json.dumps(whole_document, indent=2) + "\n")
    sys.exit(0 if all(result["passed"] for result in results) else 1)


if __name__ == "__main__":
    main()
