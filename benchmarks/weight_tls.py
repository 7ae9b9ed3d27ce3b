"""What `world.tls` costs a weight update: seconds and CPU, in clear and encrypted, in turn.

    python -m benchmarks.weight_tls --json benchmarks/weight_tls.json

Receivers are processes without a model, over loopback, so that nothing but the processors limits the bytes.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from benchmarks.fan_out import MIB, push
from benchmarks.provenance import machine
from benchmarks.receivers import SECRET, ReceiverProcess, forkserver, receivers
from pipelinerl.config.environment import CA_VARIABLE, SECRET_VARIABLE
from pipelinerl.world.tls import made_authority

UPDATES = 4


def cpu_s(running: list[ReceiverProcess]) -> float:
    """CPU seconds of this process and of the receivers so far."""
    times = [psutil.Process(one.process.pid).cpu_times() for one in running]
    return time.process_time() + sum(one.user + one.system for one in times)


def one_push(servers: int, num_bytes: int, *, encrypted: bool) -> dict[str, float]:
    """Seconds of the last of some updates, and CPU seconds of all of them per GB that passed a link."""
    variables = {CA_VARIABLE: made_authority({SECRET_VARIABLE: SECRET})} if encrypted else {}
    with mock.patch.dict(os.environ, variables), forkserver(), receivers(servers) as running:
        before = cpu_s(running)
        seconds = push(running, num_bytes, 0, versions=UPDATES)["seconds"]
        return {"s": seconds, "cpu_s_per_gb": (cpu_s(running) - before) / (UPDATES * servers * num_bytes / 1e9)}


def measure(servers: int, num_bytes: int, rounds: int) -> dict[str, Any]:
    pairs = [[one_push(servers, num_bytes, encrypted=encrypted) for encrypted in (False, True)] for _ in range(rounds)]

    def median(mode: int, key: str) -> float:
        return round(statistics.median(pair[mode][key] for pair in pairs), 3)

    row = {"servers": servers}
    for mode, name in enumerate(("clear", "tls")):
        row |= {f"{name}_s": median(mode, "s"), f"{name}_cpu_s_per_gb": median(mode, "cpu_s_per_gb")}
    row["times_longer"] = round(statistics.median(tls["s"] / clear["s"] for clear, tls in pairs), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for servers in args.servers:
        rows.append(measure(servers, args.mb * MIB, args.rounds))
        print(rows[-1], flush=True)
    if args.json:
        described = {"machine": machine(), "cores": os.cpu_count()}
        args.json.write_text(json.dumps(described | {"model_mb": args.mb, "updates": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
