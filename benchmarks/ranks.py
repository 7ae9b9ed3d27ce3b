"""Starts a script once per rank of a process group on this machine, and waits for all of them."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_ranks(script: Path, arguments: Sequence[str], ranks: int, *, timeout_s: float, env: Mapping[str, str]) -> None:
    """Runs `script` on CPU with one thread per rank.

    Args:
        env: variables in addition to this process's own.

    Raises:
        RuntimeError: a rank failed. All others have ended by then.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | dict(env)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"{script.name} on {ranks} ranks ended with {codes}")
