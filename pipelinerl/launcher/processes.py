"""Processes of the run on this node: started in sessions of their own, marked, pinned, awaited without polling.

Every process of a run carries `PIPELINERL_RUN=<random>` in its environment and every process of a role
`PIPELINERL_ROLE=<random>/<job>`, inherited by all descendants whatever sessions they open. That mark, not a name or a
process group, decides what belongs to the run when it is time to end it.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
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
from pipelinerl.observability.status import STATUS_DIR

log = logging.getLogger(__name__)

DISMISS_S = 30.0
RESTART_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class RunMark:
    """Identity of this launcher's processes, and the environment with secrets that they share."""

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
    """Start a role with its output appended to `<folder>/log.txt`. Call from the main thread only."""
    descriptor = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with pinned(command.cores):
            return subprocess.Popen(
                command.argv,
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
    """Where this node's roles run: their folder, the environment they share, and the mark of all their processes."""

    run_dir: Path
    environment: Mapping[str, str]
    mark: RunMark

    def start(self, command: RoleCommand) -> subprocess.Popen[bytes]:
        """Start a role; the status of its last process goes. Call from the main thread only."""
        for path in (self.run_dir / STATUS_DIR).glob(f"{command.name}.*"):
            path.unlink(missing_ok=True)
        return start_role(command, self.run_dir / command.name, self.mark, self.environment)

    def processes_of(self, name: str) -> list[int]:
        """Processes of a role, in whatever session."""
        return reaper.marked_processes(self.mark.role(name))

    def all_processes(self) -> list[int]:
        return reaper.marked_processes(self.mark.run)

    def sweep(self, name: str, grace_s: float) -> None:
        """End what is left of a role."""
        reaper.sweep(self.mark.role(name), grace_s)

    def sweep_all(self, grace_s: float, segments: Iterable[str]) -> None:
        """End what is left of the run on this node, and remove its shared memory."""
        reaper.sweep(self.mark.run, grace_s, segments)


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """A process started inside runs on these cores; this thread's own cores are as before afterwards."""
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
    """The exit code, when it comes; asleep until then. A code below 0 is the number of the signal that killed it."""
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


class Reaper:
    """The process that ends the run if this one is killed; `dismiss` when everything has been ended.

    Args:
        mark: the run's mark.
        grace_s: seconds between SIGTERM and SIGKILL.
        lock: descriptor of the run folder's lock, which the reaper holds until all is gone.
    """

    def __init__(self, mark: RunMark, grace_s: float, lock: int | None = None):
        self.temporary = tempfile.mkdtemp(prefix="prl-")
        """Temporary folder of the run's processes; goes when the run does."""
        self._mark, self._grace_s, self._lock = mark, grace_s, lock
        self._process = self._start()

    async def keep(self) -> None:
        """Replaces a reaper that is killed, as often as it takes. Ends when cancelled."""
        while True:
            code = await wait_for_exit(self._process)
            log.warning("event=reaper_replaced reason=%s", describe_exit(code))
            self._close_pipe()
            os.makedirs(self.temporary, mode=0o700, exist_ok=True)
            self._process = self._start()
            await asyncio.sleep(RESTART_S)

    def dismiss(self) -> None:
        """The run has ended in order: the reaper removes the temporary folder; the caller does when it was killed."""
        with contextlib.suppress(BrokenPipeError):
            self._tell("done")
        self._close_pipe()
        if self._process.wait(timeout=DISMISS_S) != 0:
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
            self._tell(self._mark.run)
        return process

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _close_pipe(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()

    def _tell(self, line: str) -> None:
        self._pipe.write(line.encode() + b"\n")
        self._pipe.flush()


def run_helper(
    argv: Sequence[str], *, timeout_s: float, stdin: str = "", env: Mapping[str, str]
) -> tuple[int, str, str]:
    """Run a helper process to its end and return code, stdout, stderr; code None is never returned.

    Whatever interrupts the wait (deadline, Ctrl-C) ends the helper and all it started.
    """
    mark = RunMark()
    watchdog = Reaper(mark, grace_s=0)
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**env, **mark.variables("helper"), "TMPDIR": watchdog.temporary},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(stdin, timeout=timeout_s)
        return process.returncode, output, errors
    finally:
        reaper.sweep(mark.run, grace_s=0)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
        watchdog.dismiss()


def stop_roles(
    processes: Mapping[str, subprocess.Popen[bytes]],
    timeouts_s: Mapping[str, float],
    ranks: Mapping[str, Sequence[int]],
    hurried: Callable[[], bool],
) -> list[str]:
    """SIGTERM to all at once; returns the names of those that did not end in time.

    Args:
        timeouts_s: seconds for each role.
        ranks: processes of a role that are asked in place of the one that was started: torchrun kills its ranks
            30 s after it was asked itself.
        hurried: nothing is waited for any more once it is true.
    """
    running = {name for name, process in processes.items() if process.poll() is None}
    for name in running:
        reaper.send(list(ranks.get(name) or [processes[name].pid]), signal.SIGTERM)
    started = time.monotonic()
    late: set[str] = set()
    while running - late and not hurried():
        time.sleep(STOP_POLL_S)
        running = {name for name in running if processes[name].poll() is None}
        late = {name for name in running if time.monotonic() - started >= timeouts_s[name]}
    return sorted(running)


@contextlib.contextmanager
def second_signal() -> Iterator[Callable[[], bool]]:
    """Inside, whether another stop signal came: for a wait that the event loop does not share."""
    came: list[int] = []
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
