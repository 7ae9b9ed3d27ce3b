"""Keeps this node's roles running until the run is done, asked to stop, or beyond its restarts.

Consumes: exits (pidfd, no polling), failures that the watchdog finds, news of other nodes, a stop request. Produces:
restarts within the budget, one `Ending`. Ends: always with every process of this node ended, whatever happened.
"""

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.exits import backoff_s, decide_after_exit
from pipelinerl.launcher.processes import Host, RunMark, wait_for_exit
from pipelinerl.launcher.run_dir import last_error_line
from pipelinerl.launcher.stopping import LEFTOVER_GRACE_S, STORES, RoleProcess, Stopper
from pipelinerl.launcher.watchdog import Watchdog
from pipelinerl.observability.role import EXIT_REFUSED

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoleFailure:
    """Why a role ended without leave."""

    job: str
    reason: str
    log_path: Path
    error_line: str

    def __str__(self) -> str:
        return f"{self.job} failed: {self.reason}\n  log: {self.log_path}\n  last error: {self.error_line}"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the run ended here."""

    kind: Literal["done", "stopped", "failed"]
    reason: str = ""
    failure: RoleFailure | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Role:
    """A role of this node and its current process."""

    command: RoleCommand
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    restarts: int = 0
    kill_reason: str | None = None
    """Why the supervisor itself killed the current process."""
    ended: bool = False
    """Exit 0 of a role that ends by itself."""

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None and self.kill_reason is None


class Others:
    """The launchers of other nodes; this one is for a world without any."""

    async def tell_actor_done(self, name: str) -> None:
        """An actor of this node made its last evaluation."""

    async def tell_end(self, ending: Ending) -> None:
        """This node is about to stop its roles."""


class Supervisor:
    """Runs the given commands. `actors` are the jobs of the whole world whose end completes the run."""

    def __init__(
        self,
        commands: Sequence[RoleCommand],
        *,
        run_dir: Path,
        environment: Mapping[str, str],
        mark: RunMark,
        limits: LauncherSection,
        actors: Sequence[str],
        training_done: Callable[[], bool],
        say: Callable[[str], None],
        report: Callable[[], None],
        others: Others | None = None,
    ):
        self._roles = {command.name: Role(command) for command in commands}
        self._host = Host(run_dir=run_dir, environment=environment, mark=mark)
        self._limits = limits
        self._watchdog = Watchdog(self._host, list(self._roles), limits)
        self._stopper = Stopper(self._host, limits, say, report)
        self._pending_actors = set(actors)
        self._training_done = training_done
        self._say = say
        self._others = others or Others()
        self._first_failure: RoleFailure | None = None
        self._ending: asyncio.Future[Ending] | None = None

    async def run(self) -> Ending:
        """Start everything, keep it running, end everything."""
        self._ending = asyncio.get_running_loop().create_future()
        tasks = [asyncio.create_task(self._keep(role)) for role in self._roles.values()]
        tasks.append(asyncio.create_task(self._watch()))
        orderly = False
        try:
            for task in tasks:
                task.add_done_callback(self._task_ended)
            ending = await self._ending
            orderly = ending.kind == "done"
            await self._others.tell_end(ending)
            return ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            roles = [RoleProcess(role.command, role.process) for role in self._roles.values() if role.process]
            self._stopper.stop_all(roles, orderly=orderly)  # blocking on purpose: nothing else is left to do

    def request_stop(self, reason: str) -> None:
        """End the run as asked from outside."""
        self._end(Ending(kind="stopped", reason=reason, restarts=self.restarts))

    def fail(self, reason: str) -> None:
        """End the run for a reason that is no role's (a node that disappeared)."""
        self._end(Ending(kind="failed", reason=reason, failure=self._first_failure, restarts=self.restarts))

    def actor_done(self, name: str) -> None:
        """An actor of any node made its last evaluation; the last one completes the run."""
        self._pending_actors.discard(name)
        if not self._pending_actors:
            self.finish()

    def finish(self) -> None:
        """The run is complete."""
        self._end(Ending(kind="done", restarts=self.restarts))

    @property
    def restarts(self) -> dict[str, int]:
        return {name: role.restarts for name, role in self._roles.items() if role.restarts}

    async def _keep(self, role: Role) -> None:
        """Consumes exits of one role; ends when the role is done."""
        while True:
            self._start(role)
            assert role.process is not None
            code = await wait_for_exit(role.process)
            await asyncio.to_thread(self._host.sweep, role.command.name, LEFTOVER_GRACE_S)
            decision = decide_after_exit(
                role.command.kind,
                code,
                role.kill_reason,
                training_done=await self._is_training_done(role),
                restarts_used=sum(self.restarts.values()),
                limits=self._limits,
            )
            if decision.action == "done":
                await self._done(role, decision.reason)
                return
            failure = self._failure(role, decision.reason)
            if decision.action == "fail":
                first = self._first_failure if code != EXIT_REFUSED else None
                self._end(Ending(kind="failed", failure=first or failure, restarts=self.restarts))
                return
            await self._back_off(role, failure)

    async def _is_training_done(self, role: Role) -> bool:
        """Asked of the streams, which answer late or not at all while their store is down: nothing waits for that."""
        return role.command.kind not in STORES and await asyncio.to_thread(self._training_done)

    async def _back_off(self, role: Role, failure: RoleFailure) -> None:
        self._first_failure = self._first_failure or failure
        delay = backoff_s(role.restarts, self._limits.restart_backoff_s)
        role.restarts += 1
        used = f"{sum(self.restarts.values())}/{self._limits.max_restarts}"
        self._say(f"{failure.job}: {failure.reason}; {failure.error_line}; restart {used} in {delay:g} s")
        await asyncio.sleep(delay)

    def _start(self, role: Role) -> None:
        role.kill_reason = None
        role.started = time.monotonic()
        role.process = self._host.start(role.command)
        log.info("started job=%s pid=%d restarts=%d", role.command.name, role.process.pid, role.restarts)

    async def _done(self, role: Role, remark: str) -> None:
        role.ended = True
        log.info("ended job=%s", role.command.name)
        if remark:
            self._say(f"{role.command.name}: {remark}")
        if role.command.kind == "actor":
            await self._others.tell_actor_done(role.command.name)
            self.actor_done(role.command.name)

    def _failure(self, role: Role, reason: str) -> RoleFailure:
        path = self._host.run_dir / role.command.name / "log.txt"
        return RoleFailure(job=role.command.name, reason=reason, log_path=path, error_line=last_error_line(path))

    async def _watch(self) -> None:
        """Kills what counts as failed."""
        while True:
            for failed in await self._watchdog.next_failures(self._started):
                self._roles[failed.job].kill_reason = failed.reason
                await self._watchdog.kill(failed)

    def _started(self) -> dict[str, float]:
        """When the processes that run now were started."""
        return {name: role.started for name, role in self._roles.items() if role.is_running}

    def _end(self, ending: Ending) -> None:
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(ending)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """An error of the supervisor itself ends the run instead of leaving a role unwatched."""
        if not task.cancelled() and (error := task.exception()) and self._ending and not self._ending.done():
            self._ending.set_exception(error)
