"""Stall of decoding per weight update for 1 to 16 servers, where the wire is the limit and not the CPU.

    python -m benchmarks.stall --json benchmarks/stall.json

One real vLLM server decodes under load while its weights change. It is the first, the middle or the last server of the
chain. The others have no model: they receive and forward every byte in processes of their own. Servers of a cluster
share no cores, so the real server has one core for itself, and everything else runs on the others. Every link is
limited to a rate that these cores can serve for all servers. The stall beyond the swap is given in decoding steps
of the same round, and for each number of servers in relation to one server.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.provenance import machine
from benchmarks.receivers import SECRET, Uplink, forkserver, receivers
from benchmarks.weight_update import SIZES, build_model, decode_step_ms, load, pushed, server, write_run
from pipelinerl.world import Job

MIB = 1 << 20
STALL, STEP, STEPS = "beyond_swap_ms", "decode_step_ms", "steps_beyond_swap"

Case = tuple[int, str]
"""Number of servers, and the place of the real one in their chain."""


def cases(counts: Sequence[int]) -> list[Case]:
    places = ("first", "last", "middle")
    return [(count, place) for count in counts for place in places[: min(count, len(places))]]


def placed(job: Job, count: int, place: str) -> Job:
    """The real server where its number puts it, among others with the numbers 1 … ``count`` - 1."""
    return msgspec.structs.replace(job, replica_idx={"first": 0, "middle": count // 2, "last": count}[place])


def one_round(job: Job, case: Case, model: torch.nn.Module, updates: int, rate: float) -> Iterator[dict[str, float]]:
    """Yields a row for each update."""
    count, place = case
    with receivers(count - 1, rate=rate, first=1) as others:
        step_ms = decode_step_ms(job, 40)
        with load(job):
            beside = [one.job for one in others]
            outcomes = pushed(placed(job, count, place), model, SECRET, updates, beside, Uplink(rate))
        step_ms = (step_ms + decode_step_ms(job, 40)) / 2
        forwarding = sum(one.ask()[0] > 0 for one in others)
    assert forwarding >= count - 1 - (place != "last"), f"{forwarding} of {count - 1} forwarded: this is no chain"
    for outcome in outcomes:
        assert outcome.answer is not None, outcome.error
        pause_ms, swap_ms = outcome.answer.pause_ms, outcome.answer.swap_ms
        row = {"pause_ms": pause_ms, "swap_ms": swap_ms, STALL: pause_ms - swap_ms, STEP: step_ms}
        yield row | {STEPS: row[STALL] / step_ms, "update_ms": 1e3 * outcome.seconds}


def measure(size: str, counts: Sequence[int], rounds: int, updates: int, rate: float) -> dict[Case, list[dict]]:
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in cases(counts)}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="stall-") as folder:
        model = build_model(Path(folder) / "model", *SIZES[size])
        job = write_run(Path(folder) / "run", Path(folder) / "model")
        os.sched_setaffinity(0, set(cores) - set(job.cores) or cores)
        with forkserver(), server(Path(folder) / "run", job, SECRET):
            for number in range(rounds):
                for case in found if number % 2 == 0 else reversed(found):
                    rows = list(one_round(job, case, model, updates, rate))
                    found[case] += rows
                    print(*case, spread([row[STEPS] for row in rows]), flush=True)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and largest."""
    ordered = sorted(values)
    shown = statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1]
    return dict(zip(("median", "p90", "max"), (round(value, 3) for value in shown), strict=True))


def summary_of(found: dict[Case, list[dict[str, float]]]) -> dict[str, Any]:
    """One entry for each case, and for each number of servers wherever the real one is."""
    entries = [
        {"servers": count, "place": place} | {name: spread([row[name] for row in rows]) for name in rows[0]}
        for (count, place), rows in found.items()
    ]
    by_count = []
    for count in dict.fromkeys(count for count, _ in found):
        rows = list(chain.from_iterable(rows for case, rows in found.items() if case[0] == count))
        one = {"servers": count, "updates": len(rows), STEPS: spread([row[STEPS] for row in rows])}
        first = by_count[0] if by_count else one
        one["over_one"] = {name: round(one[STEPS][name] / first[STEPS][name], 2) for name in ("median", "p90")}
        by_count.append(one)
    return {"cases": entries, "servers": by_count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", default="1M", choices=list(SIZES))
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=2, help="the machine's speed changes, so cases take turns")
    parser.add_argument("--updates", type=int, default=12, help="per round and case")
    parser.add_argument("--rate-mb", type=float, default=8, help="MB/s of every link")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.size, args.servers, args.rounds, args.updates, args.rate_mb * MIB)
    measured = summary_of(found)
    for row in measured["servers"]:
        print(row)
    if args.json:
        sizes = {"size": args.size, "rounds": args.rounds, "updates": args.updates, "rate_mb_per_s": args.rate_mb}
        described = {"machine": machine(), "cores": os.cpu_count(), "load_average_15_min": os.getloadavg()[2]}
        args.json.write_text(json.dumps(described | sizes | measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
