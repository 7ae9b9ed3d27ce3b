"""Host memory that a weight update costs each trainer rank, beside the size of its stripe.

    python -m benchmarks.push_memory --json benchmarks/push_memory.json

Real ranks (FSDP2 over Gloo, float32 master weights, bfloat16 on the wire) send a model of 100M parameters to receiver
processes without a model. *Extra* is the peak of the resident memory during some updates, of which the first allocates
everything, over the resident memory before them. It includes the gather of a sharded parameter. The allocator is
glibc's with its defaults, as in a run.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.receivers import SECRET, forkserver, receivers
from benchmarks.weight_update import build_model
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.engines import read_ranks
from pipelinerl.finetune.export import exported_specs
from pipelinerl.membership.role import leave
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.publish.origin import model_stripes
from tests.trainer_kit import sending_rank

MIB = 1 << 20
SIZE = (768, 11, 4096)
"""Hidden size, layers, vocabulary: 100M parameters."""
TIMEOUT_S = 900
UPDATES = 5


def peak_mb() -> float:
    """Peak resident memory since the last `reset_peak`."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_rank(job: dict[str, Any]) -> None:
    """The process of one rank: some updates, then a line of JSON."""
    torch.set_num_threads(1)
    rank, world_size, _ = read_ranks("cpu")
    given = ["output_dir=unused", f"model_path={job['model']}", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    cfg = parse(compose("base", [*given, "finetune.engine=fsdp2", "finetune.seq_packing=false", "weights.probe=false"]))
    own = sending_rank(Path("unused"), cfg, job["urls"])
    engine, sender, updates = own.engine, own.sender, own.updates
    if sender is not None:
        assert sender.wait_for_servers(own.num_servers, 60) == own.num_servers
    engine.gather_objects(None)
    gc.collect()
    reset_peak()
    before = psutil.Process().memory_info().rss / MIB
    extra_mb = []
    for version in range(1, UPDATES + 1):
        updates.after_step(version, lambda: False)
        assert updates.finish(version)
        if sender is not None:
            assert sender.wait_live(version, TIMEOUT_S, count=own.num_servers), sender.outcomes
        engine.gather_objects(None)
        extra_mb.append(round(peak_mb() - before, 1))
    layout = Layout(tuple(exported_specs(engine, torch.bfloat16)))
    start, end = model_stripes(layout, world_size)[rank]
    sizes = {"stripe_mb": round((end - start) / MIB, 1), "before_mb": round(before, 1), "extra_mb": extra_mb}
    print(json.dumps({"rank": rank} | sizes), flush=True)
    own.close()


def measure(folder: Path, ranks: int, servers: int) -> dict[str, Any]:
    with receivers(servers) as running, socket.create_server(("127.0.0.1", 0)) as probe:
        job = {"model": str(folder), "urls": [(one.job.name, one.job.url) for one in running]}
        port = probe.getsockname()[1]
        probe.close()
        processes = []
        for rank in range(ranks):
            env = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_PORT": port,
            }
            env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1, "PIPELINERL_SECRET": SECRET}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.push_memory", "--rank", json.dumps(job)],
                    env=os.environ | {name: str(value) for name, value in env.items()},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    rows = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    over = {
        name: round(max(row["extra_mb"][at] - row["stripe_mb"] for row in rows) / bucket_mb(), 2)
        for name, at in (("buckets_over_stripe_first", 0), ("buckets_over_stripe_last", -1))
    }
    return {"ranks": ranks, "servers": servers, "rows": rows} | over


def bucket_mb() -> float:
    return float(
        parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"])).weights.bucket_mb
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(json.loads(args.rank))
        leave(0)
    rows = []
    with tempfile.TemporaryDirectory(prefix="push-memory-") as folder, forkserver():
        parameters = sum(p.numel() for p in build_model(Path(folder), *SIZE).parameters())
        for ranks in args.ranks:
            rows.append(measure(Path(folder), ranks, args.servers))
            print(rows[-1], flush=True)
    if args.json:
        document = {"parameters": parameters, "updates": UPDATES, "bucket_mb": bucket_mb(), "rows": rows}
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
