"""Processes that a role starts: they start whatever libraries did in the role, and are killed when it dies."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.world.process import killed_with_parent

STARTS_ONE = """
import subprocess, sys
from pipelinerl.world.process import killed_with_parent
process = subprocess.Popen(killed_with_parent(["sleep", "600"]))
print(process.pid, flush=True)
sys.stdin.read()
"""
STARTS_ONE_BESIDE_TORCH = """
import subprocess, torch
from pipelinerl.world.process import killed_with_parent

@torch.jit.script
def in_pool(x):
    return torch.jit.wait(torch.jit.fork(torch.relu, x))

in_pool(torch.ones(2))
print(subprocess.run(killed_with_parent(["echo", "started"]), capture_output=True, text=True, timeout=60).stdout)
"""


def test_process_is_killed_when_its_parent_is_killed() -> None:
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", STARTS_ONE], stdin=pipe, stdout=pipe)
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.communicate()
        assert has_ended(child)
    finally:
        os.close(child)


def test_process_starts_beside_threads_of_torch(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STARTS_ONE_BESIDE_TORCH)  # torch reads the source of what it compiles
    command = [sys.executable, "-W", "ignore", tmp_path / "program.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.communicate(timeout=120)[0].strip() == "started"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="setpriv is missing, which starts redis-server: apt install util-linux"):
        killed_with_parent(["redis-server"])


def has_ended(pidfd: int, within_s: float = 60.0) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        return bool(selector.select(within_s))
