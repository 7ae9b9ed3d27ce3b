"""Keeps this node's roles running until the run is done, asked to stop, or beyond its restarts.

Consumes: exits (pidfd, no polling), status files (every `WATCH_INTERVAL_S`), news of other nodes, a stop
request. Produces: restarts within the budget, hang reports in `hangs/`, one `Ending`. Ends: always with every process
of this node ended, whatever happened.
"""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher import reaper
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.logs import cut_logs
from pipelinerl.launcher.processes import (
    RunMark,
    describe_exit,
    second_signal,
    start_role,
    stop_roles,
    wait_for_exit,
)
from pipelinerl.launcher.run_dir import LOG_FILE, last_error_line
from pipelinerl.launcher.starvation import RunQueues
from pipelinerl.observability.health import FailedRole, find_failed, wait_chain
from pipelinerl.observability.role import EXIT_REFUSED
from pipelinerl.observability.status import STATUS_DIR, StatusRecord, read_statuses

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
LEFTOVER_GRACE_S = 1.0
STACKS_GRACE_S = 0.5
MAX_BACKOFF_S = 30.0
ENDS_BY_ITSELF = ("actor", "preprocessor", "finetune")
"""Kinds whose exit 0 means done; everybody else serves until told to stop."""
STORES = ("redis",)
"""Kinds that everybody else needs until the very end."""


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


@dataclass(frozen=True, kw_only=True)
class Exit:
    """What a role's exit means."""

    action: Literal["done", "restart", "fail"]
    reason: str = ""


def decide_after_exit(
    kind: str, code: int, kill_reason: str | None, *, training_done: bool, restarts_used: int, limits: LauncherSection
) -> Exit:
    """Decide what follows from an exit that nobody asked for."""
    if code == 0 and kill_reason is None and kind == "actor" and training_done:
        return Exit(action="done")
    if code == 0 and kill_reason is None and kind in ENDS_BY_ITSELF and (training_done or kind == "preprocessor"):
        return Exit(action="done")
    reason = kill_reason or describe_exit(code)
    if code == 0 and kill_reason is None:
        reason = "it ended although the run goes on"
    mendable, spent = code != EXIT_REFUSED, restarts_used >= limits.max_restarts
    if training_done and (kind == "preprocessor" or (kind == "finetune" and (spent or not mendable))):
        return Exit(action="done", reason=reason)  # a trainer looks after the servers, but the run can end without
    if not mendable:
        return Exit(action="fail", reason=f"{reason}, which a restart cannot mend")
    if spent:
        return Exit(action="fail", reason=f"{reason}, and launcher.max_restarts={limits.max_restarts} is used up")
    return Exit(action="restart", reason=reason)


def backoff_s(restarts: int, base_s: float) -> float:
    """Doubles with every restart of the same role: base, 2·base, … ≤ `MAX_BACKOFF_S`."""
    return min(base_s * 2**restarts, max(base_s, MAX_BACKOFF_S))


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
        self._run_dir = run_dir
        self._environment = environment
        self._mark = mark
        self._run_queues = RunQueues(lambda job: reaper.marked_processes(mark.role(job)))
        self._limits = limits
        self._pending_actors = set(actors)
        self._training_done = training_done
        self._say = say
        self._report = report
        self._others = others or Others()
        self._first_failure: RoleFailure | None = None
        self._ending: asyncio.Future[Ending] | None = None
        self._watching_since = time.monotonic()

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
            self._stop_all(orderly=orderly)  # blocking on purpose: nothing else is left to do

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
            await asyncio.to_thread(reaper.sweep, self._mark.role(role.command.name), LEFTOVER_GRACE_S)
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
        name = role.command.name
        folder = self._run_dir / name
        for path in (self._run_dir / STATUS_DIR).glob(f"{name}.*"):
            path.unlink(missing_ok=True)
        role.kill_reason = None
        role.started = time.monotonic()
        role.process = start_role(role.command, folder, self._mark, self._environment)
        log.info("started job=%s pid=%d restarts=%d", name, role.process.pid, role.restarts)

    async def _done(self, role: Role, remark: str) -> None:
        role.ended = True
        log.info("ended job=%s", role.command.name)
        if remark:
            self._say(f"{role.command.name}: {remark} after training was done; its work is complete")
        if role.command.kind == "actor":
            await self._others.tell_actor_done(role.command.name)
            self.actor_done(role.command.name)

    def _failure(self, role: Role, reason: str) -> RoleFailure:
        path = self._run_dir / role.command.name / "log.txt"
        return RoleFailure(job=role.command.name, reason=reason, log_path=path, error_line=last_error_line(path))

    async def _watch(self) -> None:
        """Consumes status files; kills what counts as failed, after writing down what it was doing."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(WATCH_INTERVAL_S)
            now = time.monotonic()
            if now - before > 5 * WATCH_INTERVAL_S:  # this process was frozen itself: silence proves nothing
                self._watching_since = now
            started = {name: role.started for name, role in self._roles.items() if self._is_running(role)}
            await asyncio.to_thread(cut_logs, self._logs(), self._limits.max_log_mb * 2**20)
            statuses = await asyncio.to_thread(self._statuses)
            starved = await asyncio.to_thread(self._run_queues.starved, statuses, started, now)
            for failed in find_failed(statuses, started, self._limits, now, self._watching_since, starved):
                await self._kill(failed)

    def _logs(self) -> list[Path]:
        return [self._run_dir / LOG_FILE, *(self._run_dir / name / "log.txt" for name in self._roles)]

    def _statuses(self) -> dict[str, StatusRecord]:
        """Every role's newest status, on the monotonic clock: setting the clock is neither silence nor progress."""
        offset = time.time() - time.monotonic()
        return {name: status.since_boot(offset) for name, status in read_statuses(self._run_dir).items()}

    def _is_running(self, role: Role) -> bool:
        return role.process is not None and role.process.poll() is None and role.kill_reason is None

    async def _kill(self, failed: FailedRole) -> None:
        role = self._roles[failed.job]
        role.kill_reason = failed.reason
        pids = reaper.marked_processes(self._mark.role(failed.job))
        await asyncio.to_thread(write_hang_report, self._run_dir, failed, list(self._roles), self._stack_pids())
        log.warning("killing job=%s pids=%s reason=%s", failed.job, pids, failed.reason)
        await asyncio.to_thread(reaper.sweep, self._mark.role(failed.job), 0)

    def _stack_pids(self) -> list[int]:
        """Roles that registered the signal; to anybody else SIGUSR1 would be the end."""
        ours = set(reaper.marked_processes(self._mark.run))
        statuses = read_statuses(self._run_dir).values()
        return [status.pid for status in statuses if status.pid in ours and status.state == "running"]

    def _end(self, ending: Ending) -> None:
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(ending)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """An error of the supervisor itself ends the run instead of leaving a role unwatched."""
        if not task.cancelled() and (error := task.exception()) and self._ending and not self._ending.done():
            self._ending.set_exception(error)

    def _stop_all(self, *, orderly: bool) -> None:
        """SIGTERM wave by wave, the report while the streams still stand, then the sweep."""
        pids = reaper.marked_processes(self._mark.run)
        segments = reaper.shared_memory_of(pids)
        reaper.send(pids, signal.SIGCONT)  # a frozen process can neither end nor clean up
        waves = stop_waves({role.command.kind for role in self._roles.values()}, orderly=orderly)
        late: list[str] = []
        for index, kinds in enumerate(waves):
            if orderly and index == len(waves) - 1:
                self._report()
            running = {n: r.process for n, r in self._roles.items() if r.process and r.command.kind in kinds}
            limit_s = self._limits.stop_timeout_s * (1.0 if index == 0 or orderly else 0.2)
            late += self._stop_wave(running, limit_s)
        if late:
            log.warning("killed, for they did not end in time: %s", ", ".join(late))
        reaper.sweep(self._mark.run, 0 if late else LEFTOVER_GRACE_S, segments)
        for role in self._roles.values():
            if role.process:
                role.process.wait()

    def _stop_wave(self, running: Mapping[str, subprocess.Popen[bytes]], limit_s: float) -> list[str]:
        """Ask these roles to end; a trainer that made a step has time to save it. Returns who did not end."""
        statuses = read_statuses(self._run_dir)
        ranks = {
            name: [status.pid for job, status in statuses.items() if job == name or job.startswith(f"{name}.rank")]
            for name in running
            if name.startswith("finetune_")
        }
        saving = {name for name in running if name in statuses and is_to_save(name, statuses[name])}
        if saving:
            self._say(
                f"{', '.join(sorted(saving))}: saves its last step, for at most launcher.save_timeout_s="
                f"{self._limits.save_timeout_s:g} s; another Ctrl-C ends at once"
            )
        limits = {n: max(limit_s, self._limits.save_timeout_s) if n in saving else limit_s for n in running}
        with second_signal() as hurried:
            return stop_roles(running, limits, ranks, hurried)


def is_to_save(name: str, status: StatusRecord) -> bool:
    """Whether a role is a trainer with an optimizer step behind it that is not saved yet."""
    return name.startswith("finetune_") and status.state == "running" and not status.fields.get("saved", True)


def stop_waves(kinds: set[str], *, orderly: bool) -> list[set[str]]:
    """Kinds that are stopped together: orderly, who works goes before who serves; the stores always go last."""
    working, stores = kinds & set(ENDS_BY_ITSELF), kinds & set(STORES)
    serving = kinds - working - stores
    return [working, serving, stores] if orderly else [working | serving, stores]


def write_hang_report(run_dir: Path, failed: FailedRole, jobs: Sequence[str], pids: Sequence[int]) -> Path:
    """Every role's status, the wait chain and all stacks, before anything is killed."""
    reaper.send(list(pids), signal.SIGUSR1)
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
    with open(os.open(folder / "status.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        json.dump(document, stream, indent=2, default=str)
    for job in jobs:
        for stacks in (run_dir / job).glob("stacks*.txt"):
            if stacks.stat().st_size:
                shutil.copyfile(stacks, folder / f"{job}.{stacks.name}")
    return folder
