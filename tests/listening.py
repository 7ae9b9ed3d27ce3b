"""The listening sockets of a run's processes, each in the network namespace of its process."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from pipelinerl.config.environment import ROLE_VARIABLE, RUN_VARIABLE
from pipelinerl.inspect.reading import process_environment
from pipelinerl.launcher.reaper import marked_processes
from pipelinerl.observability.status import read_statuses

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
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
        found |= dict.fromkeys(listening_sockets(pid), role)
    return found


def listening_sockets(pid: int) -> set[tuple[str, int]]:
    """Address and port of the TCP sockets on which a process listens, in the network namespace of that process.

    psutil reads the tables of its own namespace.
    """
    folder = Path("/proc") / str(pid)
    links = set()
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.add(os.readlink(link))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in links:
                address, port = fields[1].split(":")
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                packed = struct.pack(f"={len(words)}I", *words)  # the kernel prints words of the machine's byte order
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def heard_by_a_stranger(host: str, ports: Sequence[int], prefix: Sequence[str] = ()) -> dict[int, dict[str, str]]:
    """What every port answers to somebody without the secret; ``prefix`` runs the stranger somewhere else."""
    command = [*prefix, sys.executable, str(STRANGER), host, *map(str, ports)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return {int(port): answers for port, answers in json.loads(done.stdout).items()}
