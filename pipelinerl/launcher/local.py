"""The engine of one node: each role is a process of this machine."""

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.engine import RoleExit
from pipelinerl.launcher.memory_kills import MemoryKills
from pipelinerl.launcher.processes import Host, wait_for_exit
from pipelinerl.launcher.stopping import LEFTOVER_GRACE_S, RoleProcess, Stopper
from pipelinerl.launcher.watchdog import Watchdog
from pipelinerl.membership.role import EXIT_LEFT

log = logging.getLogger(__name__)


@dataclass
class Running:
    """A role's current process."""

    command: RoleCommand
    process: subprocess.Popen[bytes]
    started: float
    """`time.monotonic` of its start."""
    kill_reason: str | None = None
    """Why the watchdog killed it."""


class LocalEngine:
    """Runs the roles of this node.

    Args:
        jobs: names of the node's roles.
        say: tells the user a line.
    """

    def __init__(self, host: Host, jobs: Sequence[str], limits: LauncherSection, say: Callable[[str], None]):
        self._host = host
        self._watchdog = Watchdog(host, jobs, limits)
        self._stopper = Stopper(host, limits, say)
        self._memory = MemoryKills()
        self._running: dict[str, Running] = {}

    def start(self, command: RoleCommand) -> None:
        process = self._host.start(command)
        self._running[command.name] = Running(command, process, time.monotonic())
        log.info("event=job_started job=%s pid=%d", command.name, process.pid)

    async def exit_of(self, name: str) -> RoleExit:
        running = self._running[name]
        code = await wait_for_exit(running.process)
        await asyncio.to_thread(self._host.sweep, name, LEFTOVER_GRACE_S)
        memory = self._memory.why(running.command.kind) if code not in (0, EXIT_LEFT) else None
        return RoleExit(code=code, kill_reason=running.kill_reason or memory)

    async def watch(self) -> None:
        while True:
            self._memory.look()
            for failed in await self._watchdog.next_failures(self._started):
                self._running[failed.job].kill_reason = failed.reason
                await self._watchdog.kill(failed)

    def stop_all(self, *, orderly: bool, may_save: bool, report: Callable[[], None]) -> None:
        roles = [RoleProcess(role.command, role.process) for role in self._running.values()]
        self._stopper.stop_all(roles, orderly=orderly, may_save=may_save, report=report)

    def _started(self) -> dict[str, float]:
        """Monotonic start times of the running processes, by job."""
        return {
            name: role.started
            for name, role in self._running.items()
            if role.process.poll() is None and role.kill_reason is None
        }
