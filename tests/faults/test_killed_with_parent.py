"""Processes that a role starts: they start whatever libraries did in the role, and are killed when it dies."""

import contextlib
import os
import selectors
import shutil
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
process = subprocess.Popen(killed_with_parent(["sleep", "600"]), stdout=subprocess.DEVNULL)
print(process.pid, flush=True)
sys.stdin.read()
"""
STARTS_ONE_BESIDE_A_LIBRARY = """
import ctypes, subprocess
from pipelinerl.world.process import killed_with_parent
libc = ctypes.CDLL(None)
waits_for_ever = ctypes.cast(libc.pause, ctypes.c_void_p)
libc.__register_atfork(None, None, waits_for_ever, None)  # pthread_atfork: what a child does first after a fork
print(subprocess.run(killed_with_parent(["echo", "started"]), capture_output=True, text=True).stdout)
"""


ASKS_LATE = """#!/bin/sh
while [ -d "/proc/$PPID" ]; do sleep 0.01; done
exec {setpriv} "$@"
"""


@pytest.mark.parametrize("asks", ["at once", "after its parent's death"])
def test_process_is_killed_when_its_parent_is_killed(
    asks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asks != "at once":
        late = tmp_path / "setpriv"
        late.write_text(ASKS_LATE.format(setpriv=shutil.which("setpriv")))
        late.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
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


def test_process_starts_beside_a_library_that_waits_after_a_fork() -> None:
    command = [sys.executable, "-c", STARTS_ONE_BESIDE_A_LIBRARY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.communicate(timeout=60)[0].strip() == "started"
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
