"""The process that starts the trainer ranks of a node: their environments, and how they end together."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from pipelinerl.finetune.ranks import rank_environments
from pipelinerl.launcher.logs import last_error_line

START = [sys.executable, "-m", "pipelinerl.finetune.ranks", "--first-rank=0", "--master-addr=a", "--master-port=1"]
ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60


def arguments(ranks: int, first: int, size: int) -> argparse.Namespace:
    return argparse.Namespace(ranks=ranks, first_rank=first, world_size=size, master_addr="host0", master_port=7)


def test_rank_environments_of_one_node_meet_in_a_file():
    first, second = rank_environments(arguments(2, 0, 2), "/f")
    assert (first["RANK"], first["LOCAL_RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "0", "1", "1")
    assert first["PIPELINERL_RANKS_FILE"] == second["PIPELINERL_RANKS_FILE"] == "/f/ranks"
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"]) == ("2", "2")


def test_rank_environments_of_several_nodes_meet_at_the_first():
    (rank,) = rank_environments(arguments(1, 2, 3), "/f")
    assert rank == {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "7",
        "RANK": "2",
        "LOCAL_RANK": "0",
    }


def start(folder: Path, code: str, ranks: int, log: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    head = f"import os, signal, sys, time\nrank, folder = os.environ['RANK'], {str(folder)!r}\n"
    command = [*START, f"--ranks={ranks}", f"--world-size={ranks}", "--", "-c", head + code]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=log)


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("sys.exit(3 * (rank == '1'))", 3)])
def test_ranks_end_with_zero_or_with_the_code_that_failed(tmp_path: Path, code: str, expected: int):
    assert start(tmp_path, code, 3).wait(DEADLINE_S) == expected


def test_killed_rank_ends_the_others_at_once_and_is_named_in_the_log(tmp_path: Path):
    code = "os.kill(os.getpid(), signal.SIGKILL) if rank == '1' else time.sleep(3600)"
    with open(tmp_path / "log.txt", "wb") as log:
        assert start(tmp_path, code, 3, log).wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert last_error_line(tmp_path / "log.txt") == "error: rank 1 was killed by signal 9 (Killed)"


def test_sigterm_reaches_every_rank_and_waits_for_what_they_save(tmp_path: Path):
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: (open(f'{folder}/saved{rank}', 'w').close(), sys.exit(0)))\n"
        "open(f'{folder}/ready{rank}', 'w').close()\n"
        "time.sleep(3600)"
    )
    process = start(tmp_path, code, 2)
    deadline = time.monotonic() + DEADLINE_S
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert len(list(tmp_path.glob("saved*"))) == 2
