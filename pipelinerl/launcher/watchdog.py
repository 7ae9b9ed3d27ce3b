"""Finds the roles of this node that hang or are frozen, writes a hang report, and ends their processes.

Consumes: status files (every `WATCH_INTERVAL_S`). Produces: failed roles, hang reports in `hangs/`, logs that stay
within `launcher.max_log_mb`. A role that gets no CPU is not frozen.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher import reaper
from pipelinerl.launcher.logs import cut_logs
from pipelinerl.launcher.processes import Host
from pipelinerl.observability.health import FailedRole, find_failed, job_of_status, wait_chain
from pipelinerl.observability.status import HEARTBEAT_S, StatusRecord, read_statuses

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""Far below the limits that are watched (`launcher.heartbeat_timeout_s`), and cheap."""
QUIET_S = 2 * HEARTBEAT_S
"""Roles with a younger heartbeat are not examined."""
STACKS_GRACE_S = 0.5
"""A live process writes its stacks in about ten milliseconds. One that is frozen writes none."""


class RunQueues:
    """Measures how long silent roles have been ready to run without a CPU, Linux's *run delay*.

    It does not grow while a process is stopped or waits for a lock.

    Args:
        pids_of: returns the pids of a job.
    """

    def __init__(self, pids_of: Callable[[str], list[int]]):
        self._pids_of = pids_of
        self._baselines: dict[str, tuple[float, dict[int, float]]] = {}
        """By job: its last heartbeat, and each thread's run delay when its silence began to be measured."""

    def starved(self, statuses: Mapping[str, StatusRecord], jobs: Mapping[str, float], now: float) -> dict[str, float]:
        """Return the longest wait for a CPU, in seconds, of any thread of each silent job.

        Args:
            statuses: by status name, with times of the same clock as `now`.
            jobs: running jobs. The values are not used.
        """
        silent = {
            job_of_status(name): status.heartbeat
            for name, status in statuses.items()
            if job_of_status(name) in jobs and status.state == "running" and now - status.heartbeat > QUIET_S
        }
        self._baselines = {job: known for job, known in self._baselines.items() if silent.get(job) == known[0]}
        waited = {}
        for job, heartbeat in silent.items():
            delays = {tid: delay for pid in self._pids_of(job) for tid, delay in run_delays_s(pid).items()}
            _, before = self._baselines.setdefault(job, (heartbeat, delays))
            waited[job] = max((delay - before.get(tid, 0.0) for tid, delay in delays.items()), default=0.0)
        return waited


def run_delays_s(pid: int) -> dict[int, float]:
    """Return each thread's seconds spent ready to run without running. Empty if the kernel does not report them."""
    delays = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{pid}/task/{name}/schedstat", encoding="utf-8") as stream:
                    delays[int(name)] = int(stream.read().split()[1]) / 1e9
    return delays


class Watchdog:
    """Watches the status files of roles. It ignores silence from before it was created.

    Args:
        jobs: names of all roles of this node.
    """

    def __init__(self, host: Host, jobs: Sequence[str], limits: LauncherSection):
        self._host, self._jobs, self._limits = host, jobs, limits
        self._run_queues = RunQueues(host.processes_of)
        self._since = time.monotonic()

    async def next_failures(self, started: Callable[[], Mapping[str, float]]) -> list[FailedRole]:
        """Wait one interval and return the roles that then count as failed.

        Args:
            started: returns monotonic start times of the running roles. It is called after the wait.
        """
        before = time.monotonic()
        await asyncio.sleep(WATCH_INTERVAL_S)
        now = time.monotonic()
        if now - before > 5 * WATCH_INTERVAL_S:  # this process was frozen itself, so it ignores earlier silence
            self._since = now
        running = dict(started())
        logs = [self._host.run_dir / name / "log.txt" for name in self._jobs]
        await asyncio.to_thread(cut_logs, logs, self._limits.max_log_mb * 2**20)
        statuses = await asyncio.to_thread(self._statuses)
        starved = await asyncio.to_thread(self._run_queues.starved, statuses, running, now)
        return find_failed(statuses, running, self._limits, now, self._since, starved)

    async def kill(self, failed: FailedRole) -> None:
        """Write a hang report and end a failed role's processes."""
        pids = self._host.processes_of(failed.job)
        await asyncio.to_thread(write_hang_report, self._host.run_dir, failed, self._jobs, self._stack_pids())
        log.warning("event=job_killed job=%s pids=%s reason=%s", failed.job, pids, failed.reason)
        await asyncio.to_thread(self._host.sweep, failed.job, 0)

    def _statuses(self) -> dict[str, StatusRecord]:
        """Every role's newest status, with monotonic times."""
        offset = time.time() - time.monotonic()
        return {name: status.since_boot(offset) for name, status in read_statuses(self._host.run_dir).items()}

    def _stack_pids(self) -> list[int]:
        """Pids of running roles, which handle SIGUSR1. It would end other processes."""
        ours = set(self._host.all_processes())
        statuses = read_statuses(self._host.run_dir).values()
        return [status.pid for status in statuses if status.pid in ours and status.state == "running"]


def write_hang_report(run_dir: Path, failed: FailedRole, jobs: Sequence[str], pids: Sequence[int]) -> Path:
    """Write every role's status, the wait chains and all stacks to a new folder in `hangs/`, and return that folder.

    Args:
        jobs: names of the roles whose stacks are copied.
        pids: processes that write their stacks at SIGUSR1.
    """
    reaper.signal_all(list(pids), signal.SIGUSR1)
    time.sleep(STACKS_GRACE_S)
    folder = run_dir / "hangs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{failed.job}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    statuses = read_statuses(run_dir)
    chains = {name: wait_chain(name, statuses) for name in statuses}
    document = {
        "job": failed.job,
        "reason": failed.reason,
        "wait_chains": chains,
        "statuses": {
            name: vars(status) | {"waits": [vars(w) for w in status.waits]} for name, status in statuses.items()
        },
    }
    with open(
        os.open(folder / "status.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as stream:
        json.dump(document, stream, indent=2, default=str)
    for job in jobs:
        for stacks in (run_dir / job).glob("stacks*.txt"):
            if stacks.stat().st_size:
                shutil.copyfile(stacks, folder / f"{job}.{stacks.name}")
    return folder
