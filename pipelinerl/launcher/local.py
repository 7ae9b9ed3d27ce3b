"""The engine of one node: each role is a process of this machine."""

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher import reaper
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.engine import LEFTOVER_GRACE_S, RoleExit, stop_in_waves
from pipelinerl.launcher.memory_kills import MemoryKills
from pipelinerl.launcher.processes import Host, second_signal, stop_roles, wait_for_exit
from pipelinerl.launcher.watchdog import Watchdog
from pipelinerl.membership.role import EXIT_LEFT
from pipelinerl.observability.status import read_statuses

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
    """Runs the roles of this node, named by ``jobs``. ``say`` prints a line for the user."""

    def __init__(self, host: Host, jobs: Sequence[str], limits: LauncherSection, say: Callable[[str], None]):
        self._host, self._limits, self._say = host, limits, say
        self._watchdog = Watchdog(host, jobs, limits)
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
        pids = self._host.all_processes()
        segments = reaper.shared_memory_of(pids)
        reaper.signal_all(pids, signal.SIGCONT)  # a frozen process can neither end nor clean up
        late: list[str] = []

        def stop_wave(kinds: Collection[str], limit_s: float) -> None:
            late.extend(self.stop_kinds(kinds, limit_s, may_save=may_save))

        kinds = {role.command.kind for role in self._running.values()}
        stop_in_waves(kinds, stop_wave, self._limits, orderly=orderly, report=report)
        if late:
            log.warning("event=killed reason=did not end in time jobs=%s", ", ".join(late))
        self._host.sweep_all(0 if late else LEFTOVER_GRACE_S, segments)
        for role in self._running.values():
            role.process.wait()

    def stop_kinds(self, kinds: Collection[str], limit_s: float, *, may_save: bool) -> list[str]:
        """Ask the roles of these kinds to end, wait for it, and return the names of those that did not.

        Args:
            may_save: whether a trainer with an unsaved step gets `launcher.save_timeout_s`.
        """
        running = {name: role.process for name, role in self._running.items() if role.command.kind in kinds}
        ranks = {name: self._host.ranks_of(name) for name in running if name.startswith("finetune_")}
        statuses = read_statuses(self._host.run_dir) if may_save else {}
        saving = {
            name
            for name in ranks.keys() & statuses.keys()
            if statuses[name].state == "running" and not statuses[name].fields.get("saved", True)
        }
        if saving:
            self._say(
                f"{', '.join(sorted(saving))}: saves its last step, for at most launcher.save_timeout_s="
                f"{self._limits.save_timeout_s:g} s; another Ctrl-C ends at once"
            )
        limits = {n: max(limit_s, self._limits.save_timeout_s) if n in saving else limit_s for n in running}
        with second_signal() as hurried:
            return stop_roles(running, limits, ranks, hurried)

    def _started(self) -> dict[str, float]:
        """Monotonic start times of the running processes, by job."""
        return {
            name: role.started
            for name, role in self._running.items()
            if role.process.poll() is None and role.kill_reason is None
        }
