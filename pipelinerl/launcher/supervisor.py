"""Keeps roles running until the run is done, is asked to stop, or has used up its restarts.

The supervisor reacts to exits that the engine reports, to messages of other nodes and to a stop request. It restarts
roles within the budget and returns one `Ending`. When it ends, every process that the engine started has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl.config.sections import LauncherSection
from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.engine import RoleEngine
from pipelinerl.launcher.exits import decide_after_exit, restart_delay_s
from pipelinerl.launcher.run_dir import last_error_line
from pipelinerl.launcher.stopping import STORES
from pipelinerl.membership.lease import EndKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoleFailure:
    """The reason for which a role ended unexpectedly, with its log and last error."""

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


class Others:
    """Messages to the launchers of other nodes. This base class sends none, as a world of one node has no others."""

    async def tell_actor_done(self, name: str) -> None:
        """Tell the others that an actor of this node made its last evaluation."""

    async def tell_end(self, ending: Ending) -> None:
        """Tell the others that this node is about to stop its roles."""


class Supervisor:  # structure: the roles, their engine, and by what their exits are judged
    """Keeps roles running.

    Args:
        commands: start commands of the roles.
        engine: runs the processes of the roles.
        run_dir: the run folder.
        limits: section `launcher` of the configuration.
        awaited: names of the jobs of the whole world whose end is the end of the run: the actors, or with
            `debug.mode` the roles that work alone.
        training_done: returns whether the trainer made its last step. It may block, so a thread calls it.
        say: tells the user a line.
        report: writes the report at an orderly end, while the streams can still be read.
        others: the launchers of other nodes.
        trains_on_several_nodes: whether the trainer's ranks need other nodes, so that none can save when one is lost.
        alone: roles run without the rest of the run, see `decide_after_exit`.
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
        others: Others | None = None,
        trains_on_several_nodes: bool = False,
        alone: bool = False,
    ):
        self._roles = {command.name: Role(command) for command in commands}
        self._engine = engine
        self._run_dir = run_dir
        self._limits = limits
        self._report = report
        self._awaited = set(awaited)
        self._alone = alone
        self._training_done = training_done
        self._say = say
        self._others = others or Others()
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
            await self._others.tell_end(ending)
            return ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Blocking on purpose: nothing else is left.
            self._engine.stop_all(orderly=orderly, may_save=may_save, report=self._report)

    def rely_on(self, task: asyncio.Task[None]) -> None:
        """End the run when this task of the launcher itself fails, instead of leaving its work undone."""
        task.add_done_callback(self._task_ended)

    def request_stop(self, reason: str) -> None:
        """End the run because of a request from outside. ``reason`` is the name of the signal."""
        self._end(Ending(kind="stopped", reason=reason, restarts=self.restarts))

    def fail(self, reason: str, *, is_cut_off: bool = False) -> None:
        """End the run for a reason outside this node's roles. ``is_cut_off``: the reason is a node that is lost."""
        self._end(
            Ending(
                kind="failed",
                reason=reason,
                failure=self._first_failure,
                restarts=self.restarts,
                is_cut_off=is_cut_off,
            )
        )

    def actor_done(self, name: str) -> None:
        """Note that an awaited job of any node has ended its work. The last one completes the run."""
        self._awaited.discard(name)
        if not self._awaited:
            self.finish()

    def finish(self) -> None:
        """End the run as complete."""
        self._end(Ending(kind="done", restarts=self.restarts))

    @property
    def restarts(self) -> dict[str, int]:
        return {name: role.restarts for name, role in self._roles.items() if role.restarts}

    async def _keep(self, role: Role) -> None:
        """Start a role and react to its exits. Ends when the role is done or the run fails."""
        while True:
            self._engine.start(role.command)
            end = await self._engine.exit_of(role.command.name)
            decision = decide_after_exit(
                role.command.kind,
                end.code,
                end.kill_reason,
                training_done=await self._is_training_done(role),
                restarts_used=sum(self.restarts.values()),
                limits=self._limits,
                alone=self._alone,
            )
            if decision.action == "done":
                await self._done(role, decision.reason)
                return
            failure = self._failure(role, decision.reason)
            if decision.action == "fail":
                first = self._first_failure if end.code != EXIT_REFUSED else None
                self._end(Ending(kind="failed", failure=first or failure, restarts=self.restarts))
                return
            await self._back_off(role, failure)

    async def _is_training_done(self, role: Role) -> bool:
        """Return whether training is done. A thread reads the streams, because a store that is down delays the answer.

        The result is False for the stores' own roles, because they must restart without the streams.
        """
        return role.command.kind not in STORES and await asyncio.to_thread(self._training_done)

    async def _back_off(self, role: Role, failure: RoleFailure) -> None:
        self._first_failure = self._first_failure or failure
        delay = restart_delay_s(role.restarts, self._limits.restart_backoff_s)
        role.restarts += 1
        used = f"{sum(self.restarts.values())}/{self._limits.max_restarts}"
        self._say(f"{failure.job}: {failure.reason}; {failure.error_line}; restart {used} in {delay:g} s")
        await asyncio.sleep(delay)

    async def _done(self, role: Role, remark: str) -> None:
        log.info("event=job_ended job=%s", role.command.name)
        if remark:
            self._say(f"{role.command.name}: {remark}")
        if role.command.name in self._awaited:
            await self._others.tell_actor_done(role.command.name)
            self.actor_done(role.command.name)

    def _failure(self, role: Role, reason: str) -> RoleFailure:
        path = self._run_dir / role.command.name / "log.txt"
        return RoleFailure(job=role.command.name, reason=reason, log_path=path, error_line=last_error_line(path))

    def _end(self, ending: Ending) -> None:
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(ending)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            log.error("event=launcher_task_failed task=%s", task.get_name(), exc_info=error)
            self.fail(f"the launcher itself failed in {task.get_name()}: {type(error).__name__}: {error}")
