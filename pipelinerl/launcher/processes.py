"""Starts, marks, pins, awaits and stops the run's processes on this node. Each role has its own session.

A process belongs to a run by `PIPELINERL_RUN=<random>` in its environment, and to a role by
`PIPELINERL_ROLE=<random>/<job>`. All descendants inherit these marks, even in new sessions.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pipelinerl.config.environment import ROLE_VARIABLE, RUN_VARIABLE
from pipelinerl.launcher import reaper
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.observability.status import STATUS_DIR, read_statuses
from pipelinerl.world.keeper import ORPHANED_S
from pipelinerl.world.process import kept

log = logging.getLogger(__name__)

DISMISS_S = 30.0
"""A finished launcher waits this long for its temporary folder to be removed. Then the reaper goes on alone."""
REAPER_GRACE_S = ORPHANED_S
"""Processes get the same time to clean up from the reaper and from a keeper."""
TEMPORARY_PREFIX = "prl-"
OWNER_FILE = ".owner"
"""In the temporary folder: its run and launcher."""
RESTART_S = 1.0
"""Between two starts of a reaper that something keeps killing."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_POLL_S = 0.02
"""A stop lasts no longer than this beyond its slowest role."""


@dataclass(frozen=True, kw_only=True)
class RunMark:
    """Random identity of this launcher's processes, as variables of their environment."""

    token: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def run(self) -> str:
        return f"{RUN_VARIABLE}={self.token}"

    def role(self, name: str) -> str:
        return f"{ROLE_VARIABLE}={self.token}/{name}"

    def variables(self, name: str) -> dict[str, str]:
        return {RUN_VARIABLE: self.token, ROLE_VARIABLE: f"{self.token}/{name}"}


def start_role(
    command: RoleCommand, folder: Path, mark: RunMark, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a role. Call from the main thread only, because roles get SIGTERM when the thread that started them ends.

    Args:
        folder: the role's output is appended to `log.txt` in it.
        environment: variables of all roles, besides those of `command` and `mark`.
    """
    descriptor = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with pinned(command.cores):
            return subprocess.Popen(
                kept(command.argv),
                env={**environment, **command.env, **mark.variables(command.name)},
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The run folder, the environment, and the mark of the processes of this node's roles."""

    run_dir: Path
    environment: Mapping[str, str]
    mark: RunMark
    used: set[str] = field(default_factory=set)
    """Paths of shared memory that the run's processes had mapped when one of its roles ended."""

    def start(self, command: RoleCommand) -> subprocess.Popen[bytes]:
        """Delete the status of the role's last process and start the role. Call from the main thread only."""
        for path in (self.run_dir / STATUS_DIR).glob(f"{command.name}.*"):
            path.unlink(missing_ok=True)
        return start_role(command, self.run_dir / command.name, self.mark, self.environment)

    def processes_of(self, name: str) -> list[int]:
        """Return the pids of a role's processes in all sessions."""
        return reaper.marked_processes(self.mark.role(name))

    def ranks_of(self, name: str) -> list[int]:
        """Return the pids of a role's ranks from their status files, if they are processes of this run on this node."""
        # A file may belong to another node, or to an earlier process whose number another program has now.
        ours, statuses = set(self.processes_of(name)), read_statuses(self.run_dir).items()
        return [s.pid for job, s in statuses if (job == name or job.startswith(f"{name}.rank")) and s.pid in ours]

    def all_processes(self) -> list[int]:
        return reaper.marked_processes(self.mark.run)

    def sweep(self, name: str, grace_s: float) -> None:
        """End all remaining processes of a role: SIGTERM, then SIGKILL after `grace_s`."""
        # Shared memory that other roles have mapped stays until the run ends, such as a killed trainer's segments
        # through which its servers get weights (CUDA IPC).
        self.used.update(reaper.shared_memory_of(self.all_processes()))
        reaper.sweep(self.mark.role(name), grace_s)

    def sweep_all(self, grace_s: float, segments: Iterable[str]) -> None:
        """End all remaining processes of the run on this node and remove its shared memory.

        Args:
            segments: paths of shared memory of processes that have already ended.
        """
        reaper.sweep(self.mark.run, grace_s, {*segments, *self.used})


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pin this thread, and processes that it starts, to those of `cores` that it may use while the block runs."""
    before = os.sched_getaffinity(0)
    wanted = before & set(cores)
    if wanted:
        os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        if wanted:
            os.sched_setaffinity(0, before)


async def wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Sleep until the process ends, without polling, and return its exit code (below 0: minus a signal's number)."""
    code = process.poll()
    if code is not None:
        return code
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, lambda: None if exited.done() else exited.set_result(None))
    try:
        await exited
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def remove_left_by(owner: str) -> None:
    """Remove the temporary folders of this owner's killed reapers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_ours and (folder / OWNER_FILE).read_text(encoding="utf-8") == owner:
                log.info("event=temporary_removed folder=%s", folder)
                subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


class Reaper:
    """Owns the process that ends the run if this process is killed. Call `dismiss` when the run has ended.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
        lock: descriptor of the run folder's lock, which the reaper holds until all processes have ended.
        owner: guarded by only one reaper of this machine at a time. Temporary folders of earlier ones are removed.
    """

    def __init__(self, mark: RunMark, grace_s: float, lock: int | None = None, owner: str = ""):
        if owner:
            remove_left_by(owner)
        self.temporary = tempfile.mkdtemp(prefix=TEMPORARY_PREFIX)
        """Temporary folder of the run's processes. It is deleted at the end of the run."""
        Path(self.temporary, OWNER_FILE).write_text(owner, encoding="utf-8")
        self._mark, self._grace_s, self._lock = mark, grace_s, lock
        self._process = self._start()

    async def keep(self) -> None:
        """Start another reaper whenever the reaper was killed. Ends when cancelled."""
        while True:
            code = await wait_for_exit(self._process)
            log.warning("event=reaper_replaced reason=%s", describe_exit(code))
            self._close_pipe()
            os.makedirs(self.temporary, mode=0o700, exist_ok=True)
            self._process = self._start()
            await asyncio.sleep(RESTART_S)

    def dismiss(self) -> None:
        """Let the reaper remove the temporary folder and exit. If it needs more than `DISMISS_S` it goes on alone."""
        with contextlib.suppress(BrokenPipeError):
            self._write_line("done")
        self._close_pipe()
        try:
            code = self._process.wait(timeout=DISMISS_S)
        except subprocess.TimeoutExpired:
            log.warning("event=temporary_large folder=%s it is still being removed", self.temporary)
            return
        if code != 0:  # it was killed
            subprocess.run(["rm", "-rf", "--", self.temporary], stderr=subprocess.DEVNULL, check=False)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", reaper.__file__, str(self._grace_s), self.temporary],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            pass_fds=() if self._lock is None else (self._lock,),
        )
        self._process = process
        with contextlib.suppress(BrokenPipeError):
            self._write_line(self._mark.run)
        return process

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _close_pipe(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()

    def _write_line(self, line: str) -> None:
        self._pipe.write(line.encode() + b"\n")
        self._pipe.flush()


def stop_roles(
    processes: Mapping[str, subprocess.Popen[bytes]],
    timeouts_s: Mapping[str, float],
    ranks: Mapping[str, Sequence[int]],
    hurried: Callable[[], bool],
) -> list[str]:
    """Send SIGTERM to all roles at once and wait. Returns the names of the roles that did not end in time.

    Args:
        processes: by name of the role, as the next two.
        timeouts_s: how long to wait.
        ranks: pids that get the signal instead of the role's own process, which only waits for them.
        hurried: the wait ends as soon as this returns true.
    """
    running = {name for name, process in processes.items() if process.poll() is None}
    for name in running:
        reaper.signal_all(list(ranks.get(name) or [processes[name].pid]), signal.SIGTERM)
    started = time.monotonic()
    late: set[str] = set()
    while running - late and not hurried():
        time.sleep(STOP_POLL_S)
        running = {name for name in running if processes[name].poll() is None}
        late = {name for name in running if time.monotonic() - started >= timeouts_s[name]}
    return sorted(running)


@contextlib.contextmanager
def second_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a stop signal came during the block, which blocks the event loop."""
    came: list[int] = []
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
