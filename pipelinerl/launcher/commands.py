"""How each role is started: command line, environment and cores as pure functions of job and world.

No command contains a secret. Secrets are added when the process starts and are never written to a file.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.world import Job, WorldMap, interface_of, visible_devices
from pipelinerl.world.cluster import LOOPBACK
from pipelinerl.world.placement import PARTS

FOLDERS = {
    "actor_llm": "pipelinerl.inference",
    "preprocessor_llm": "pipelinerl.inference",
    "actor_llm_part": "pipelinerl.inference",
    "preprocessor_llm_part": "pipelinerl.inference",
    "actor": "pipelinerl.actor",
    "preprocessor": "pipelinerl.preprocess",
    "verifier": "pipelinerl.domains.verifier",
    "environment": "pipelinerl.domains.environments",
    "finetune": "pipelinerl.finetune",
    "redis": "pipelinerl.membership.redis_role",
}
NOT_INHERITED = (
    "PYTHONDONTWRITEBYTECODE",  # every start would compile everything again
    "PYTHONOPTIMIZE",  # transformers reads docstrings, and a role's assertions are its own check
    "HYDRA_FULL_ERROR",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
NOT_INHERITED_PREFIXES = ("TORCHELASTIC_", "PET_")
ALLOCATOR = "PYTORCH_ALLOC_CONF"
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Host memory is page-locked by eight threads: 8 GB/s instead of 2.4 on an H200's host. A first update and a first
checkpoint wait for it."""
SEGMENTS = "expandable_segments:True"
"""Lengths vary, and fixed segments would fragment. Not on shared GPUs, where weights travel as CUDA IPC handles."""


@dataclass(frozen=True, kw_only=True)
class RoleCommand:
    """One role's process: its arguments, the variables that it has in addition to inherited ones, and its cores."""

    name: str
    kind: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cores: tuple[int, ...]
    """Empty = not pinned."""


CommandOf = Callable[[Job, WorldMap, Path, Mapping[str, str]], RoleCommand]
"""Builds the command of a job from the world, the run folder, and the environment of its node."""


def role_command(job: Job, world: WorldMap, run_dir: Path, env: Mapping[str, str]) -> RoleCommand:
    """Return the command of one job. `env` is the launcher's own environment."""
    role = ("-m", FOLDERS[job.kind], "--run-dir", str(run_dir), "--job", job.name)
    prefix: tuple[str, ...] = (sys.executable,)
    if job.kind == "finetune" and world.trainer_world_size > 1:
        prefix += rank_arguments(job, world)
    return RoleCommand(
        name=job.name, kind=job.kind, argv=prefix + role, env=role_environment(job, world, env), cores=job.cores
    )


def rank_arguments(job: Job, world: WorldMap) -> tuple[str, ...]:
    """Arguments that start the trainer ranks of one node."""
    return (
        "-m",
        "pipelinerl.finetune.ranks",
        f"--ranks={job.num_ranks}",
        f"--first-rank={job.first_rank}",
        f"--world-size={world.trainer_world_size}",
        f"--master-addr={world.master_addr}",
        f"--master-port={world.master_port}",
        "--",
    )


def role_environment(job: Job, world: WorldMap, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that this job has in addition to inherited ones."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SPT_NOENV": "1",  # setproctitle must keep /proc/<pid>/environ readable: it marks the run's processes
    }
    if world.accelerator == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = visible_devices(job.gpus, env)
        if ALLOCATOR not in env:
            grows = job.kind == "finetune" and not world.share_devices
            variables[ALLOCATOR] = f"{PINNING},{SEGMENTS}" if grows else PINNING
    else:
        threads = max(1, len(job.cores) // max(1, job.num_ranks)) if job.kind == "finetune" else 1
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    if job.kind == "finetune" and world.trainer_world_size == 1:
        variables |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": world.master_addr,
            "MASTER_PORT": str(world.master_port),
        }
    if job.kind in ("finetune", *PARTS.keys(), *PARTS.values()):
        interface = interface_of(job.hostname if world.is_open else LOOPBACK)
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        variables |= {name: interface for name in names if interface and name not in env}
    return variables


def inherited_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that concern only the launcher."""
    return {
        name: value
        for name, value in env.items()
        if name not in NOT_INHERITED and not name.startswith(NOT_INHERITED_PREFIXES)
    }


def start_script(command: RoleCommand, cwd: Path) -> str:
    """Return a shell script that starts the role by hand from the folder `cwd`. It fails without the run's secret."""
    pin = f"taskset -c {','.join(map(str, command.cores))} " if command.cores else ""
    lines = ["#!/bin/sh", f"# {command.name}, as the launcher starts it. Secrets come from the environment."]
    lines.append(f': "${{{SECRET_VARIABLE}:?the per-run secret must be in the environment}}"')
    lines += [f"unset {' '.join(NOT_INHERITED)}", f"cd {shlex.quote(str(cwd))} || exit 1"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(command.env.items())]
    return "\n".join([*lines, f"exec {pin}{shlex.join(command.argv)}"]) + "\n"


def printable(command: RoleCommand) -> str:
    """Return the command as one shell line for people to read."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(command.env.items()))
    pin = f"taskset -c {','.join(map(str, command.cores))} " if command.cores else ""
    return f"{variables} {pin}{shlex.join(command.argv)}"
