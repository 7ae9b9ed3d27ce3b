"""Tells a role that gets no CPU from one that is frozen.

A thread that is ready to run and does not run adds to the *run delay* that Linux keeps for it. A stopped process and a
process that waits for a lock add nothing. So the delay since a role fell silent is time that says nothing against it.
"""

import contextlib
import os
from collections.abc import Callable, Mapping

from pipelinerl.observability.health import job_of
from pipelinerl.observability.status import HEARTBEAT_S, StatusRecord

QUIET_S = 2 * HEARTBEAT_S
"""A role whose heartbeat is younger is not looked at."""


class RunQueues:
    """The run delay of roles that are silent.

    Args:
        pids_of: the processes of a job.
    """

    def __init__(self, pids_of: Callable[[str], list[int]]):
        self._pids_of = pids_of
        self._baselines: dict[str, tuple[float, dict[int, float]]] = {}
        """By job: the heartbeat after which it fell silent, and each thread's delay when that was noticed."""

    def starved(self, statuses: Mapping[str, StatusRecord], jobs: Mapping[str, float], now: float) -> dict[str, float]:
        """Seconds for which the busiest thread of each silent job has waited for a CPU since it fell silent."""
        silent = {
            job_of(name): status.heartbeat
            for name, status in statuses.items()
            if job_of(name) in jobs and status.state == "running" and now - status.heartbeat > QUIET_S
        }
        self._baselines = {job: known for job, known in self._baselines.items() if silent.get(job) == known[0]}
        waited = {}
        for job, heartbeat in silent.items():
            delays = {tid: delay for pid in self._pids_of(job) for tid, delay in run_delays_s(pid).items()}
            _, before = self._baselines.setdefault(job, (heartbeat, delays))
            waited[job] = max((delay - before.get(tid, 0.0) for tid, delay in delays.items()), default=0.0)
        return waited


def run_delays_s(pid: int) -> dict[int, float]:
    """By thread: seconds spent ready to run without running; empty where the kernel does not tell."""
    delays = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{pid}/task/{name}/schedstat") as stream:
                    delays[int(name)] = int(stream.read().split()[1]) / 1e9
    return delays
