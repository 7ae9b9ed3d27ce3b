"""Shared by all tests: every test must leave no process, listening port or shared-memory segment behind."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

LEAK_DEADLINE_S = 10.0


def _is_running(process: psutil.Process) -> bool:
    """Alive, and not Python's own resource tracker, which lives as long as the interpreter that started it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and not any(
            "multiprocessing.resource_tracker" in argument for argument in process.cmdline()
        )
    except psutil.NoSuchProcess:
        return False


def _children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if _is_running(p)}


def _shared_memory() -> set[str]:
    """Names in /dev/shm, without those that a process which is not ours has mapped."""
    names = set(os.listdir("/dev/shm"))
    return names - _mapped_by_others(names) if names else names


def _mapped_by_others(names: set[str]) -> set[str]:
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    mapped: set[str] = set()
    for pid in set(psutil.pids()) - ours:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            mapped |= {name for name in names if f"/dev/shm/{name}" in maps}
    return mapped


def _listening() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaks. What a fixture of wider scope started before the test may exist after it."""
    before = (_children(), _shared_memory(), _listening())
    yield
    deadline = time.monotonic() + LEAK_DEADLINE_S
    while True:
        leaked = [
            sorted(now - then) for now, then in zip((_children(), _shared_memory(), _listening()), before, strict=True)
        ]
        if not any(leaked):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: processes {leaked[0]}, /dev/shm {leaked[1]}, ports {leaked[2]}")
        time.sleep(0.05)
