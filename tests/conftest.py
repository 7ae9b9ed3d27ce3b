"""Shared by all tests: every test must leave no process, listening port or shared-memory segment behind."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

LEAK_DEADLINE_S = 60.0


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
    return set(os.listdir("/dev/shm"))


def _is_left(name: str) -> bool:
    """Whether a name in /dev/shm that appeared during a test is its leak.

    Not one that only a process which is not ours has mapped, and not the name of a semaphore that nobody has mapped
    any more: Python leaves it when a test SIGKILLs a process, here or in another session on this machine. The
    launcher's own tests hold it to remove even these.
    """
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    return _is_mapped(name, ours) or (not name.startswith("sem.mp-") and not _is_mapped(name, psutil.pids()))


def _is_mapped(name: str, pids: Iterable[int]) -> bool:
    for pid in pids:
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


def _listening() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaks. What a fixture of wider scope started before the test may exist after it."""
    children, segments, ports = _children(), _shared_memory(), _listening()
    yield
    deadline = time.monotonic() + LEAK_DEADLINE_S
    while True:
        leaked = [
            sorted(_children() - children),
            sorted(name for name in _shared_memory() - segments if _is_left(name)),
            sorted(_listening() - ports),
        ]
        if not any(leaked):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: processes {leaked[0]}, /dev/shm {leaked[1]}, ports {leaked[2]}")
        time.sleep(0.05)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
