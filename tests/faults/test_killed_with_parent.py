"""Processes that a role starts: they start whatever libraries did in the role, and end when it dies."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys

STARTS_ONE = """
import subprocess, sys
from pipelinerl.world.process import kept
process = subprocess.Popen(kept(["sh", "-c", "echo $$; exec sleep 600"]))
sys.stdin.read()
"""
STARTS_ONE_BESIDE_A_LIBRARY = """
import ctypes, subprocess
from pipelinerl.world.process import kept
libc = ctypes.CDLL(None)
waits_for_ever = ctypes.cast(libc.pause, ctypes.c_void_p)
libc.__register_atfork(None, None, waits_for_ever, None)  # pthread_atfork: what a child does first after a fork
print(subprocess.run(kept(["echo", "started"]), capture_output=True, text=True).stdout)
"""


def test_process_ends_when_its_parent_is_killed() -> None:
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


def has_ended(pidfd: int, within_s: float = 60.0) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        return bool(selector.select(within_s))
