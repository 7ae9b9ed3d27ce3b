"""Stall of decoding per weight update when several servers get it.

    python -m benchmarks.stall --json benchmarks/stall.json

A real vLLM server decodes under load while its weights change. Beside it are servers without a model, which get the
same updates and pull them from it. The stall should be the swap and about one decoding step, for any number of them.
Each figure is the median of the rounds' medians.
"""

import argparse
import json
import os
import platform
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.receivers import SECRET, forkserver, receivers
from benchmarks.weight_update import SIZES, build_model, decode_step_ms, load, server, staged, summary, write_run


def measure(size: str, counts: list[int], rounds: int, updates: int) -> dict[str, Any]:
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(prefix="stall-") as folder, forkserver():
        model = build_model(Path(folder) / "model", *SIZES[size])
        job = write_run(Path(folder) / "run", Path(folder) / "model")
        with server(Path(folder) / "run", job, SECRET):
            for _, count in product(range(rounds), counts):
                with receivers(count - 1, first=1) as others:
                    step_ms = decode_step_ms(job)
                    with load(job):
                        costs = staged(job, model, SECRET, updates, [one.job for one in others])
                    step_ms = (step_ms + decode_step_ms(job)) / 2
                row = {name: costs[name]["median"] for name in ("pause_ms", "swap_ms", "beyond_swap_ms", "update_ms")}
                row |= {"decode_step_ms": step_ms, "steps_beyond_swap": row["beyond_swap_ms"] / step_ms}
                found[count].append(row)
                print(count, row, flush=True)
    rows = [
        {"servers": count} | {name: summary([row[name] for row in rows]) for name in rows[0]}
        for count, rows in found.items()
    ]
    return {"size": size, "rounds": rounds, "updates": updates, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", default="1M", choices=list(SIZES))
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="the machine's speed changes, so counts take turns")
    parser.add_argument("--updates", type=int, default=12, help="per round and number of servers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(args.size, args.servers, args.rounds, args.updates)
    for row in measured["rows"]:
        print(row)
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        args.json.write_text(json.dumps(machine | measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
