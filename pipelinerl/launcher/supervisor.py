"""Keeps roles running until the run is done, is asked to stop, or has used up its restarts.

Consumes: losses from the engine and from the launchers of other nodes, and stop requests. It carries out the decisions
of `losses` and returns one `Ending`, when every process that the engine started has ended.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.engine import STORES, RoleEngine, RoleExit
from pipelinerl.launcher.logs import last_error_line, length_of
from pipelinerl.launcher.losses import Decision, ProcessLost, decide, restart_delay_s
from pipelinerl.launcher.run_dir import why_not_writable
from pipelinerl.membership.lease import EndKind

log = logging.getLogger(__name__)

FREED_BYTES = 64 * 2**20
"""More free space that ends the wait of a role whose disk was full: some records, more than logs write meanwhile."""
TRY_AGAIN_S = 60.0
"""The full disk may be another one, whose space is not watched."""
SPACE_POLL_S = 1.0
"""Between two looks at the disk."""


@dataclass(frozen=True, kw_only=True)
class RoleFailure:
    """Why a role ended unexpectedly, with its log and last error."""

    job: str
    reason: str
    log_path: Path
    error_line: str

    def __str__(self) -> str:
        return f"{self.job} failed: {self.reason}\n  log: {self.log_path}\n  last error: {self.error_line}"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of the run on this node."""

    kind: EndKind
    reason: str = ""
    failure: RoleFailure | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    is_cut_off: bool = False
    """Whether another node is lost."""


@dataclass
class Role:
    """A role and the number of its restarts."""

    command: RoleCommand
    restarts: int = 0
    waits_for_space: int = 0
    """Times that it ended because its disk was full."""
    log_begins: int = 0
    """Bytes of its log that earlier processes and launches wrote."""


class PeerLaunchers:
    """Messages to the launchers of other nodes. This base class sends none, for a world of one node."""

    async def tell_actor_done(self, name: str) -> None:
        """Announce that an actor of this node made its last evaluation."""

    async def tell_end(self, ending: Ending) -> None:
        """Announce that this node is about to stop its roles."""


class Supervisor:
    """Keeps roles running.

    Args:
        awaited: names of the jobs of the whole world whose end is the end of the run: the actors, or with
            `debug.mode` the standalone roles.
        training_done: returns whether the trainer made its last step. It may block, so a thread calls it.
        say: prints a line for the user.
        report: writes the report at an orderly end, while the streams can still be read.
        trains_on_several_nodes: whether the trainer's ranks need other nodes, so that none can save when one is lost.
        standalone: see `ProcessLost.is_standalone`.
    """

    def __init__(
        self,
        commands: Sequence[RoleCommand],
        engine: RoleEngine,
        *,
        run_dir: Path,
        limits: LauncherSection,
        awaited: Sequence[str],
        training_done: Callable[[], bool],
        say: Callable[[str], None],
        report: Callable[[], None],
        peers: PeerLaunchers | None = None,
        trains_on_several_nodes: bool = False,
        standalone: bool = False,
    ):
        self._roles = {command.name: Role(command) for command in commands}
        self._engine = engine
        self._run_dir = run_dir
        self._limits = limits
        self._report = report
        self._awaited = set(awaited)
        self._standalone = standalone
        self._training_done = training_done
        self._say = say
        self._peers = peers or PeerLaunchers()
        self._trains_on_several_nodes = trains_on_several_nodes
        self._first_failure: RoleFailure | None = None
        self._ending: asyncio.Future[Ending] | None = None

    async def run(self) -> Ending:
        """Start all roles, keep them running, and end them. Returns how the run ended."""
        self._ending = asyncio.get_running_loop().create_future()
        tasks = [
            asyncio.create_task(self._keep(role), name=f"supervising {name}") for name, role in self._roles.items()
        ]
        tasks.append(asyncio.create_task(self._engine.watch(), name="watching the roles"))
        orderly, may_save = False, True
        try:
            for task in tasks:
                self.rely_on(task)
            ending = await self._ending
            orderly = ending.kind == "done"
            may_save = not (ending.is_cut_off and self._trains_on_several_nodes)
            await self._peers.tell_end(ending)
            return ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Blocking on purpose: nothing else is left.
            self._engine.stop_all(orderly=orderly, may_save=may_save, report=self._report)

    def rely_on(self, task: asyncio.Task[None]) -> None:
        """End the run when this task of the launcher itself fails."""
        task.add_done_callback(self._task_ended)

    def request_stop(self, reason: str) -> None:
        """End the run because of a request from outside. ``reason`` is the name of the signal."""
        self.carry_out(Decision(action="end", ending="stopped", reason=reason))

    def fail(self, reason: str) -> None:
        """End the run for a reason outside this node's roles."""
        self.carry_out(Decision(action="end", reason=reason))

    def carry_out(self, decision: Decision) -> None:
        """End the run if the decision about a loss outside this node's roles is to end it."""
        if decision.action == "end":
            failure = self._first_failure if decision.ending == "failed" else None
            self._end(decision, failure, decision.reason)

    def actor_done(self, name: str) -> None:
        """Note that an awaited job of any node has ended its work. The last one completes the run."""
        self._awaited.discard(name)
        if not self._awaited:
            self.carry_out(Decision(action="end", ending="done"))

    @property
    def restarts(self) -> dict[str, int]:
        return {name: role.restarts for name, role in self._roles.items() if role.restarts}

    async def _keep(self, role: Role) -> None:
        """Start a role and react to its losses. Ends when the role is done or the run ends."""
        name = role.command.name
        while True:
            role.log_begins = length_of(self._log_path(role))
            self._engine.start(role.command)
            end = await self._engine.exit_of(name)
            decision = decide(await self._process_lost(role, end) if isinstance(end, RoleExit) else end)
            match decision.action:
                case "continue":
                    await self._done(role, decision.reason)
                    return
                case "end":
                    failure = self._failure(role, decision.reason)
                    self._end(decision, (self._first_failure if decision.is_spent else None) or failure)
                    return
                case "restart":
                    await self._back_off(role, self._failure(role, decision.reason))
                case "wait":
                    await self._wait_for_space(role, self._failure(role, decision.reason))
                case "move":
                    self._say(f"{name}: {decision.reason}; it is placed again")

    async def _process_lost(self, role: Role, end: RoleExit) -> ProcessLost:
        return ProcessLost(
            kind=role.command.kind,
            code=end.code,
            kill_reason=end.kill_reason,
            is_training_done=await self._is_training_done(role),
            is_standalone=self._standalone,
            restarts_used=sum(self.restarts.values()),
            max_restarts=self._limits.max_restarts,
        )

    async def _is_training_done(self, role: Role) -> bool:
        """Return whether training is done. False for the stores' own roles, which must restart without the streams."""
        return role.command.kind not in STORES and await asyncio.to_thread(self._training_done)

    async def _back_off(self, role: Role, failure: RoleFailure) -> None:
        self._first_failure = self._first_failure or failure
        delay = restart_delay_s(role.restarts, self._limits.restart_backoff_s)
        role.restarts += 1
        used = f"{sum(self.restarts.values())}/{self._limits.max_restarts}"
        self._say(f"{failure.job}: {failure.reason}; {failure.error_line}; restart {used} in {delay:g} s")
        await asyncio.sleep(delay)

    async def _wait_for_space(self, role: Role, failure: RoleFailure) -> None:
        """Wait until the run's disk has more free space, or for `TRY_AGAIN_S`."""
        if not role.waits_for_space:
            reason = f"{failure.reason}; {failure.error_line}"
            self._say(f"{failure.job}: {reason}; waiting for free space (not counted as a restart)")
        role.waits_for_space += 1
        log.warning("event=waiting_for_space job=%s times=%d", failure.job, role.waits_for_space)
        free, deadline = shutil.disk_usage(self._run_dir).free, time.monotonic() + TRY_AGAIN_S
        while True:
            await asyncio.sleep(SPACE_POLL_S)
            if time.monotonic() > deadline or shutil.disk_usage(self._run_dir).free >= free + FREED_BYTES:
                return

    async def _done(self, role: Role, remark: str) -> None:
        log.info("event=job_ended job=%s", role.command.name)
        if remark:
            self._say(f"{role.command.name}: {remark}")
        if role.command.name in self._awaited:
            await self._peers.tell_actor_done(role.command.name)
            self.actor_done(role.command.name)

    def _failure(self, role: Role, reason: str) -> RoleFailure:
        path = self._log_path(role)
        error_line = why_not_writable(self._run_dir) or last_error_line(path, since=role.log_begins)
        return RoleFailure(job=role.command.name, reason=reason, log_path=path, error_line=error_line)

    def _log_path(self, role: Role) -> Path:
        return self._run_dir / role.command.name / "log.txt"

    def _end(self, decision: Decision, failure: RoleFailure | None, reason: str = "") -> None:
        if self._ending is None or self._ending.done():
            return
        kind, is_cut_off = decision.ending, decision.is_cut_off
        self._ending.set_result(
            Ending(kind=kind, reason=reason, failure=failure, restarts=self.restarts, is_cut_off=is_cut_off)
        )

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            log.error("event=launcher_task_failed task=%s", task.get_name(), exc_info=error)
            self.fail(f"the launcher itself failed in {task.get_name()}: {type(error).__name__}: {error}")
