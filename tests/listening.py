"""The listening sockets of a run's processes, each in the network namespace of its process."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from pipelinerl.config.environment import ROLE_VARIABLE, RUN_VARIABLE
from pipelinerl.inspect.outside import process_environment
from pipelinerl.launcher.reaper import marked_processes
from pipelinerl.observability.status import read_statuses

STRANGER = Path(__file__).with_name("stranger.py")


def listening(run_dir: Path, launchers: Sequence[int] = ()) -> dict[tuple[str, int], str]:
    """(address, port) → the role that listens there, of all processes of the run and of its launchers."""
    marks = {process_environment(status.pid).get(RUN_VARIABLE) for status in read_statuses(run_dir).values()} - {None}
    pids = {pid for mark in marks for pid in marked_processes(f"{RUN_VARIABLE}={mark}")}
    roles = {pid: process_environment(pid).get(ROLE_VARIABLE, "/launcher") for pid in pids | set(launchers)}
    for pid in pids:  # redis-server writes its title over its environment
        for child in psutil.Process(pid).children():
            roles.setdefault(child.pid, roles[pid])
    found = {}
    for pid, path in sorted(roles.items()):
        role = path.rpartition("/")[2]
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.ip, connection.laddr.port] = role
    return found


def heard_by_a_stranger(host: str, ports: Sequence[int], prefix: Sequence[str] = ()) -> dict[int, dict[str, str]]:
    """What every port answers to somebody without the secret; ``prefix`` runs the stranger somewhere else."""
    command = [*prefix, sys.executable, str(STRANGER), host, *map(str, ports)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return {int(port): answers for port, answers in json.loads(done.stdout).items()}
