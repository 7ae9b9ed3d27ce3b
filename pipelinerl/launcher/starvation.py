"""Tells a role that gets no CPU from one that is frozen.

Linux counts the time in which a thread is ready to run but does not run as its *run delay*. The delay does not grow
while a process is stopped or waits for a lock. The delay since a role fell silent is therefore no sign that it hangs.
"""

import contextlib
import os
from collections.abc import Callable, Mapping

from pipelinerl.observability.health import job_of_status
from pipelinerl.observability.status import HEARTBEAT_S, StatusRecord

QUIET_S = 2 * HEARTBEAT_S
"""Roles with a younger heartbeat are not examined."""


class RunQueues:
    """Measures the run delay of roles that are silent.

    Args:
        pids_of: returns the pids of a job.
    """

    def __init__(self, pids_of: Callable[[str], list[int]]):
        self._pids_of = pids_of
        self._baselines: dict[str, tuple[float, dict[int, float]]] = {}
        """By job: its last heartbeat, and each thread's run delay when the silence was noticed."""

    def starved(self, statuses: Mapping[str, StatusRecord], jobs: Mapping[str, float], now: float) -> dict[str, float]:
        """Return the seconds for which each silent job has waited for a CPU since its silence was noticed.

        A job has waited as long as the thread of it that waited longest.

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
                with open(f"/proc/{pid}/task/{name}/schedstat") as stream:
                    delays[int(name)] = int(stream.read().split()[1]) / 1e9
    return delays
