"""A world of four GPUs on one: four launchers share a card. Server of tensor-parallel size 2, two FSDP2 ranks, NCCL.

    python -m benchmarks.one_card.world results/one_card --dry-run                 # on any machine, starts nothing
    python -m benchmarks.one_card.world results/one_card --json results/one_card.json
    python -m benchmarks.one_card.world results/killed --strike finetune_1
    python -m benchmarks.one_card.world results/mixture --experts --steps 15       # experts divided on both sides

NCCL 2.5 to 2.29 refuses two ranks on one GPU where both have the same host hash, which `NCCL_HOSTID` sets; from 2.30.3
on `NCCL_MULTI_RANK_GPU_ENABLE` allows them. The bytes go over NCCL's sockets, so the seconds say little about several
cards. What it shows is that groups form, workers learn their shards, and updates go live under captured CUDA graphs.
Ends with 1 where one of these failed.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit, machine
from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.launcher.command_line import quoted
from pipelinerl.launcher.gpu_check.checks import one_device, stop
from pipelinerl.launcher.gpu_check.run_facts import log_text, run_facts
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.observability.status import read_statuses
from tests.models import save_mixture

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Of the nodes: two of the server, two of the trainer."""
OPTIONS = (
    *(
        "world.accelerator=cuda",
        f"world.hosts=[{','.join(ADDRESSES)}]",
        "world.gpus_per_node=1",
        "world.run_id=onecard",
    ),
    *("world.nodes_per_server=2", "world.actor_fraction=2", "world.finetune_fraction=2"),
    *("vllm_config.vllm_kwargs.tensor-parallel-size=2", "vllm_config.vllm_kwargs.dtype=bfloat16"),
    # Four processes take memory at once, so none of them may measure what is free.
    *(
        "vllm_config.vllm_kwargs.gpu-memory-utilization=0.15",
        "+vllm_config.vllm_kwargs.kv-cache-memory-bytes=2147483648",
    ),
    "+vllm_config.vllm_kwargs.disable-custom-all-reduce=true",  # it maps the memory of the others' GPUs
    *("finetune.engine=fsdp2", "finetune.dtype=bfloat16", "weights.stall_s=60", "weights.bucket_mb=128"),
)
WITH_EXPERTS = (
    *("tiny_model=null", "finetune.expert_ranks=2", "+vllm_config.vllm_kwargs.enable-expert-parallel=true"),
    *("finetune.rl.entropy_bonus=0.01", "eval.at_start=false", "eval.at_end=false"),  # random weights earn nothing
)
ENVIRONMENT = {
    **{"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
    **{"NCCL_MULTI_RANK_GPU_ENABLE": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    "WANDB_MODE": "disabled",
}
EVENTS = ("nccl_group_formed", "nccl_group_failed", "nccl_group_left", "shard_learned", "weights_are_reloaded")
"""They are counted in the logs of all roles."""
STRIKE_STEP = 15
"""Optimizer steps before a strike: groups have formed, and versions went live."""
LOOK_S = 0.5


def launchers(
    run_dir: Path, options: Sequence[str], secret: str, env: Mapping[str, str]
) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of the launcher of each node."""
    command = [
        sys.executable,
        "-m",
        "pipelinerl.launch",
        "--config-name=quickstart",
        f"output_dir={quoted(str(run_dir))}",
    ]
    common = {**env, **ENVIRONMENT, **one_device(env), SECRET_VARIABLE: secret, "WORLD_SIZE": str(len(ADDRESSES))}
    return [
        ([*command, *OPTIONS, *options], common | {"RANK": str(rank), "NCCL_HOSTID": f"part-{rank}-of-a-card"})
        for rank in range(len(ADDRESSES))
    ]


def run(out: Path, options: Sequence[str], *, strike: str = "", limit_s: float = 600) -> dict[str, Any]:
    """Run the world in `out/run`, with the launchers' output in `out/node_N.log`, and return its facts.

    Args:
        strike: job whose process is killed after `STRIKE_STEP` optimizer steps. "" = none.
        limit_s: seconds after which the launchers are stopped.
    """
    out.mkdir(parents=True, exist_ok=True)
    started, processes = time.monotonic(), list[subprocess.Popen[bytes]]()
    try:
        for rank, (command, env) in enumerate(launchers(out / "run", options, secrets.token_hex(32), os.environ)):
            with open(out / f"node_{rank}.log", "wb") as log:
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))

        def ended() -> bool:
            over = time.monotonic() - started > limit_s
            return over or all(process.poll() is not None for process in processes)

        struck = bool(strike) and kill(out / "run", strike, ended)
        while not ended():
            time.sleep(LOOK_S)
    finally:
        for process in processes:
            stop(process)
    codes = [process.returncode for process in processes]
    return {"codes": codes, "seconds": round(time.monotonic() - started, 1), "struck": struck, **facts(out / "run")}


def kill(run_dir: Path, job: str, ended: Callable[[], bool]) -> bool:
    """Kill a job's process once the trainer has made `STRIKE_STEP` steps. False: the run ended before."""
    while not ended():
        made = len(read_metrics(run_dir, "finetune"))
        for name, status in read_statuses(run_dir).items() if made >= STRIKE_STEP else ():
            if name.partition(".")[0] == job:  # a trainer rank's status is `finetune_1.rank1`
                os.kill(status.pid, signal.SIGKILL)
                return True
        time.sleep(LOOK_S)
    return False


def facts(run_dir: Path) -> dict[str, Any]:
    """Facts of the run folder, with the number of each of `EVENTS`."""
    logs = "".join(log_text(path.parent) for path in sorted(run_dir.glob("*/log.txt")))
    return run_facts(run_dir) | {event: logs.count(f"event={event} ") for event in EVENTS}


def problems(found: Mapping[str, Any], strike: str = "") -> list[str]:
    """Why the world did not do what it is to show. Empty: it did."""
    said = [f"node {rank} ended with {code}" for rank, code in enumerate(found["codes"]) if code]
    said += [fault for fault in found["faults"] if not strike]
    said += [f"no {event}" for event in ("nccl_group_formed", "shard_learned") if not found[event]]
    said += [
        f"{found[event]} {event}" for event in ("nccl_group_failed", "nccl_group_left") if found[event] and not strike
    ]
    said += ["no update went live"] if not found["swaps"] else []
    return said + ([f"{strike} was not struck: the run ended before"] if strike and not found["struck"] else [])


def with_experts(out: Path, *, make: bool = True) -> list[str]:
    """Options for a tiny mixture of experts in `out/model`, which is made if it is missing."""
    model = out.absolute() / "model"
    if make and not model.exists():
        save_mixture(model)
    return [*WITH_EXPERTS, f"model_path={quoted(str(model))}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the run and the launchers' logs")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--experts", action="store_true", help="a tiny mixture of experts with random weights")
    parser.add_argument("--strike", default="", help=f"job that is killed after {STRIKE_STEP} steps")
    parser.add_argument("--limit-s", type=float, default=600)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = [f"finetune.max_train_steps={args.steps}", *(["dry_run=true"] if args.dry_run else [])]
    options += with_experts(args.out, make=not args.dry_run) if args.experts else []
    found = run(args.out, options, strike=args.strike, limit_s=args.limit_s)
    if args.dry_run:
        print((args.out / "node_0.log").read_text(errors="replace"))
        return max(found["codes"])
    told = problems(found, args.strike)
    about = {"command": " ".join(sys.argv), "machine": machine(), "commit": commit()}
    text = json.dumps(about | {"problems": told} | found, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
