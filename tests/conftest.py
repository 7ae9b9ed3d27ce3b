"""Shared by all tests.

Every test must leave no process, listening port or shared-memory segment behind, and what later tests see as it was.
With `--seed=N` the files, and the tests of each, run in another order. Random numbers that a test draws without a seed
of its own depend on its name and N alone.
"""

import contextlib
import gc
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import hydra
import numpy as np
import psutil
import pytest

from pipelinerl.world.proxies import bypass
from tests import compositions
from tests.process_state import chosen, differences, process_state, restore, restore_choices

hydra.compose = compositions.compose
bypass(os.environ)  # a session of rollouts does it, too, and no test may change what later ones see
LEAK_DEADLINE_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="runs the tests in the order of this seed, instead of the files' order")
    parser.addoption(
        "--guard", action="store_true", help="fails any test that changes what later tests of its process see"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without garbage collection, which visits a million objects that imports have made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # nanobind reports frozen objects of C extensions as leaks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffles files, and tests within their file, so that fixtures of a file are made once."""
    seed = config.getoption("--seed")
    if seed is not None:
        items.sort(key=lambda item: (_place(seed, item.nodeid.partition("::")[0]), _place(seed, item.nodeid)))


def _place(seed: int | None, name: str) -> float:
    return random.Random(f"{seed} {name}").random()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    number = int(_place(request.config.getoption("--seed"), request.node.nodeid) * 2**32)
    random.seed(number)
    np.random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(number)


def _is_running(process: psutil.Process) -> bool:
    """Alive, and not Python's own resource tracker, which lives as long as the interpreter that started it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and not any(
            "multiprocessing.resource_tracker" in argument for argument in process.cmdline()
        )
    except psutil.NoSuchProcess:
        return False


def _children() -> set[int]:
    """psutil reads of every process on this machine whose child it is, so it is asked only if there are any."""
    with contextlib.suppress(OSError):  # a thread that ended, or a kernel that does not list children
        if not any(task.joinpath("children").read_text() for task in Path("/proc/self/task").iterdir()):
            return set()
    return {p.pid for p in psutil.Process().children(recursive=True) if _is_running(p)}


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _maker(name: str) -> int | None:
    """The process for which CUDA (`cuda.shm.UID.PID.N`, in hex) or torch (`torch_PID_…`) made shared memory."""
    if match := re.match(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.", name):
        return int(match[1], 16)
    return int(match[1]) if (match := re.match(r"torch_(\d+)_", name)) else None


def _is_left(name: str) -> bool:
    """Whether a name in /dev/shm that appeared during a test is its leak.

    Not what CUDA and torch keep until this process ends, and not what another run on this machine has: segments that
    only others have mapped, or that CUDA or torch made for another process that lives. Nor the name of a semaphore that
    nobody has mapped any more: Python leaves it when a test SIGKILLs a process, here or in another session on this
    machine. The launcher's own tests hold it to remove even these.
    """
    ours, maker = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}, _maker(name)
    if maker == os.getpid() or (maker is not None and maker not in ours and psutil.pid_exists(maker)):
        return False
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


@pytest.fixture(autouse=True, scope="module")
def file_leaves_its_process_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Puts back what a file has changed. If it is a file of unit or contract tests, it fails.

    A state takes 15 ms, so it is taken for every test with ``--guard`` alone.
    """
    gc.collect()
    gc.freeze()  # what the files before have imported
    before = process_state()
    yield
    restore_choices(before)
    changed = differences(before, process_state())
    restore(before)
    always = ("tests/unit/", "tests/contract/")
    if changed and (request.config.getoption("--guard") or request.node.nodeid.startswith(always)):
        pytest.fail("\n".join(["this file changed (which test: --guard)", *changed]), pytrace=False)


@pytest.fixture(autouse=True)
def test_leaves_its_process_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Puts back what a test may choose. With ``--guard``, a test that changes anything else fails."""
    guarded = request.config.getoption("--guard")
    before = process_state() if guarded else chosen()
    yield
    restore_choices(before)
    if guarded and (changed := differences(before, process_state())):
        pytest.fail("\n".join(["this test changed", *changed]), pytrace=False)


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
