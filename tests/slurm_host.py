"""A SLURM cluster of several nodes on this machine, as Debian's packages allow: one slurmctld, one slurmd per node."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.ports import free_port

START_TIMEOUT_S = 60.0
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
NEEDED = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "sinfo")


def is_installed() -> bool:
    """Whether this machine can run such a cluster; slurmd wants to be root."""
    return os.geteuid() == 0 and all(shutil.which(program) for program in NEEDED)


def configuration(folder: Path, nodes: list[str], ports: list[int], cpus: int, lost_after_s: int) -> str:
    """`slurm.conf` without munge, cgroups and accounting. ``lost_after_s``: until SLURM gives a silent node up."""
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "AuthType=auth/none",
        "CredType=cred/none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd.%n.log",
        "SlurmdParameters=config_overrides",
        "KillWait=60",
        "MinJobAge=300",
        f"SlurmdTimeout={lost_after_s}",
        "ReturnToService=2",
    ]
    for name, port in zip(nodes, ports[1:], strict=True):
        address = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port}"
        lines.append(f"NodeName={name} {address} CPUs={cpus} State=UNKNOWN")
    lines.append(f"PartitionName=all Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


@contextmanager
def slurm(folder: Path, num_nodes: int = 2, cpus: int = 8, lost_after_s: int = 300) -> Iterator[dict[str, str]]:
    """The environment with which SLURM's commands find the cluster, which ends with the context."""
    nodes = [f"n{index}" for index in range(num_nodes)]
    (folder / "state").mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(configuration(folder, nodes, [free_port() for _ in range(1 + num_nodes)], cpus, lost_after_s))
    env = os.environ | {"SLURM_CONF": str(conf)}
    daemons = [subprocess.Popen(["slurmctld", "-D", "-c", "-f", str(conf)], env=env, **QUIET)]
    try:
        daemons += [subprocess.Popen(["slurmd", "-D", "-N", name, "-f", str(conf)], env=env, **QUIET) for name in nodes]
        deadline = time.monotonic() + START_TIMEOUT_S
        while _idle_nodes(env) < num_nodes:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-3000:]
            assert all(daemon.poll() is None for daemon in daemons), "a daemon of SLURM ended"
            time.sleep(0.5)
        yield env
    finally:
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=env, capture_output=True, timeout=30)
        time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def lose_node(env: dict[str, str], name: str) -> None:
    """Kill every process of a node at once, as a power cut does: its slurmd, the steps and their tasks.

    They are stopped first, so that none reports the death of another.
    """
    lost = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ()
            if variables.get("SLURM_CONF") == env["SLURM_CONF"] and variables.get("SLURMD_NODENAME") == name:
                lost += [process, *process.parents()[:1]]
            if process.cmdline()[:4] == ["slurmd", "-D", "-N", name] and env["SLURM_CONF"] in process.cmdline():
                lost.append(process)
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in lost:
            with suppress(psutil.Error):
                act(process)


@contextmanager
def node_back(env: dict[str, str], name: str) -> Iterator[None]:
    """A node that was lost is there again for the time of the context."""
    daemon = subprocess.Popen(["slurmd", "-D", "-N", name, "-f", env["SLURM_CONF"]], env=env, **QUIET)
    try:
        yield
    finally:
        daemon.kill()
        daemon.wait()


def _idle_nodes(env: dict[str, str]) -> int:
    found = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], env=env, capture_output=True, text=True, timeout=30)
    return found.stdout.split().count("idle")
