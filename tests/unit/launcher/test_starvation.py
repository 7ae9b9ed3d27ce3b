"""Processes that get no CPU, and processes that are stopped."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from pipelinerl.launcher.watchdog import RunQueues, run_delays_s
from tests.unit.observability.test_health import NOW, status

SPIN = "import os, sys; os.nice(int(sys.argv[1])); print('spins', flush=True)\nwhile True: pass"


@contextlib.contextmanager
def spinning(nice: int, core: int) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(nice)], stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def silent():
    return {"actor_0": status("actor_0", heartbeat=10)}


def test_starved_process_that_shares_its_core_adds_run_delay(silent) -> None:
    core = min(os.sched_getaffinity(0))
    with spinning(0, core), spinning(19, core) as starved:
        queues = RunQueues(lambda job: [starved.pid])
        assert queues.starved(silent, {"actor_0": 0.0}, NOW) == {"actor_0": 0.0}
        wait_until(lambda: queues.starved(silent, {"actor_0": 0.0}, NOW)["actor_0"] > 0.3)


def test_starved_stopped_process_adds_nothing(silent) -> None:
    core = min(os.sched_getaffinity(0))
    with spinning(0, core), spinning(19, core) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
        queues = RunQueues(lambda job: [stopped.pid])
        queues.starved(silent, {"actor_0": 0.0}, NOW)
        before = run_delays_s(os.getpid())
        wait_until(lambda: run_delays_s(os.getpid()) != before)
        assert queues.starved(silent, {"actor_0": 0.0}, NOW) == {"actor_0": 0.0}


def test_starved_role_that_beats_again_starts_from_nothing(silent) -> None:
    delays = iter([{1: 5.0}, {1: 9.0}, {1: 20.0}])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelinerl.launcher.watchdog.run_delays_s", lambda pid: next(delays))
        queues = RunQueues(lambda job: [1])
        assert queues.starved(silent, {"actor_0": 0.0}, NOW) == {"actor_0": 0.0}
        assert queues.starved(silent, {"actor_0": 0.0}, NOW) == {"actor_0": 4.0}
        later = {"actor_0": replace(silent["actor_0"], heartbeat=NOW)}
        assert queues.starved(later, {"actor_0": 0.0}, NOW) == {}
        again = {"actor_0": replace(silent["actor_0"], heartbeat=NOW + 1)}
        assert queues.starved(again, {"actor_0": 0.0}, NOW + 20) == {"actor_0": 0.0}
