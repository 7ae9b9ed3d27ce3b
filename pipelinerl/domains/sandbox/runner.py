"""The outside of the sandbox: keeps one jail, sends it programs, reads their outcomes.

Waits for a free slot (``concurrency``), then for the outcomes, at most ``Limits.total_s`` + ``GRACE_S``. Closing a
program's connection ends all its processes.

| mode | needs | identity of the program |
|---|---|---|
| root | root with CAP_SYS_ADMIN | a separate user for every run |
| user | user namespaces | the jail's user, in a user namespace for every run |

Every input of a program is a run of its own. In both modes a run gets a PID, mount and network namespace, a root file
system of read-only system folders and an empty working folder in memory, no /proc, resource limits, its own count of
processes, no new privileges, and a filter of system calls. The supervisor stands outside its PID namespace, so the
program cannot address it. A machine that allows neither mode runs no programs.
"""

import asyncio
import base64
import itertools
import json
import logging
import marshal
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
import sysconfig
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelinerl.domains.sandbox.protocol import Outcome, run_in_turn
from pipelinerl.errors import VerifierError

INSIDE = Path(__file__).parent / "inside"
MODES = ("root", "user")
FIRST_UID, NUM_UIDS = 260_000, 60_000
"""Range of the user ids that programs run as, far above the ids of accounts."""


def interpreter() -> str:
    """Returns the path of the interpreter itself, not of a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


def check_mode(mode: str) -> str:
    """Returns ``mode``. Raises ``ValueError`` if it is not in ``MODES``: others do not isolate enough."""
    if mode not in MODES:
        raise ValueError(
            f"sandbox mode {mode!r} does not isolate a program (landlock shares the user's processes and disk with it, "
            "bwrap its supervisor): use 'root' or 'user', or set sandbox_endpoint"
        )
    return mode


log = logging.getLogger(__name__)

COUNTS_BY_NAMESPACE = (5, 14)
"""The first Linux that counts a user's processes per user namespace. In mode ``user``, older ones count all programs
together, so that a fork bomb hits its neighbours."""
START_S = 30.0
"""Seconds for a jail to start, which takes a fraction of one on an idle machine."""
GRACE_S = 10.0
"""Seconds beyond a run's time in which its supervisor must report, on a busy machine, too."""
STOP_S = 5.0
"""Seconds from closing the socket to SIGKILL of a jail, which then ends by itself at once."""
RECEIVE_BYTES = 1 << 20
"""One chunk of a report, which has `Limits.output_kb` at most."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program. Memory and processes include everything that the program starts."""

    cpu_s: int = 10
    """CPU seconds of one process."""
    wall_s: float = 15.0
    """Wall seconds of one run."""
    total_s: float = 60.0
    """Wall seconds of all runs of the program."""
    memory_mb: int = 1024
    disk_mb: int = 64
    """Size of each of the two writable folders. A full one behaves as a full disk."""
    processes: int = 32
    output_kb: int = 1024
    limit_addresses: bool = True
    """Whether ``memory_mb`` also limits the address space of a process. Some runtimes reserve more than they use."""


TOO_LATE = Outcome(ended="time", exit_code=-9, seconds=0.0, stdout="", stderr="")
"""A run that had no time left."""
KILLED = Outcome(ended="signal", exit_code=-9, seconds=0.0, stdout="", stderr="")
"""A run whose supervisor was killed, because the program exhausted the machine."""


class Jail:
    """One jail process. It forks for every run and lives until it is closed.

    Args:
        mode: one of ``MODES``.
        workspace: size of its folder (``disk_mb``), and ``port`` of its loopback on which ``listening`` listens, or 0.
            Whoever answers there closes it. None: the jail's runs are Python programs that share nothing.
        readable: further files and folders of this machine that its programs may read, at the same paths.

    Raises:
        VerifierError: this machine does not allow the mode.
    """

    def __init__(self, mode: str, workspace: Mapping[str, int] | None = None, readable: Sequence[str] = ()):
        self._control, theirs = socket.socketpair()
        self.uid = FIRST_UID + secrets.randbelow(NUM_UIDS)  # of its own, so that jails share no limits
        readable = sorted({os.path.realpath(sys.base_prefix), sysconfig.get_path("purelib"), *readable})
        settings = (mode, str(self.uid), json.dumps(workspace), *readable)
        command = [interpreter(), "-E", "-S", "-B", str(INSIDE / "jail.py"), *settings]
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["LD_BIND_NOW"] = "1"  # else every process writes into the call tables of its libraries
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                start_new_session=True,
            )
        self._control.settimeout(START_S)
        descriptors: list[int] = []
        try:
            received, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            answer = received.decode().strip()
        except TimeoutError:
            answer = f"the jail did not start within {START_S:g} s"
        except OSError as failure:
            answer = f"the jail ended: {failure}"
        self.listening = socket.socket(fileno=descriptors[0]) if descriptors else None
        if answer != "ready":
            self.close()
            raise VerifierError(f"the sandbox did not start: {answer or 'the jail ended'}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        """Opens a connection to a new supervisor."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"p"], [theirs.fileno()])
            except OSError:  # the jail has ended
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Sandbox:
    """Runs programs, ``concurrency`` at a time. ``close`` ends its jail, as does its garbage collection.

    Raises:
        ValueError: a mode that does not isolate programs.

    Example:
        >>> sandbox = Sandbox()
        >>> # (outcome,) = await sandbox.run_python("print(input()[::-1])", ["abc"]); outcome.stdout == "cba\\n"
    """

    def __init__(self, *, limits: Limits | None = None, concurrency: int | None = None, mode: str | None = None):
        self.limits = limits or Limits()
        self.mode = None if mode is None else check_mode(mode)
        self._concurrency = concurrency or len(os.sched_getaffinity(0))
        self._slots = asyncio.Semaphore(self._concurrency)
        self._starting = asyncio.Lock()
        self._uids = itertools.count(secrets.randbelow(NUM_UIDS))
        self._jail: Jail | None = None
        self._end: weakref.finalize | None = None

    async def run_python(self, code: str, stdins: Sequence[str]) -> list[Outcome]:
        """See ``ProgramRunner.run_python``."""
        async with self._slots:
            deadline = time.monotonic() + self.limits.total_s
            return await run_in_turn(lambda stdin: self._run(code, stdin, deadline - time.monotonic()), stdins)

    def close(self) -> None:
        """Ends the jail. The next program starts another one."""
        if self._end is not None:
            self._end()
        self._jail = self._end = None

    async def _started(self) -> Jail:
        """Returns the jail. Starts it in the strongest mode that works here, and again if it died."""
        async with self._starting:
            if self._jail is None or not self._jail.is_alive:
                self.close()
                self.mode, jail = await asyncio.to_thread(start_jail, (self.mode,) if self.mode else MODES)
                self._jail, self._end = jail, weakref.finalize(self, jail.close)
            return self._jail

    def _specification(self, code: str, stdin: str, left_s: float) -> dict[str, Any]:
        limits = asdict(self.limits) | {"wall_s": min(self.limits.wall_s, left_s)}
        if self.mode == "user":
            limits["processes"] = self._user_processes()
        uid = FIRST_UID + next(self._uids) % NUM_UIDS
        return {"uid": uid, "code": code, "stdin": stdin.encode("utf-8", "surrogatepass"), "limits": limits}

    def _user_processes(self) -> int:
        """Returns the kernel's limit of processes where all programs are one user. It includes supervisor and init."""
        own = self.limits.processes + 2
        major, minor = re.findall(r"\d+", os.uname().release)[:2]
        if (int(major), int(minor)) >= COUNTS_BY_NAMESPACE:
            return own
        return own * self._concurrency + 1

    async def _run(self, code: str, stdin: str, left_s: float) -> Outcome:
        """Makes one run of at most ``left_s`` seconds."""
        if left_s <= 0:
            return TOO_LATE
        jail = await self._started()
        try:
            report = await supervise(jail, self._specification(code, stdin, left_s), left_s)
        except TimeoutError:
            return TOO_LATE
        return as_outcome(report) if report else KILLED


async def supervise(jail: Jail, specification: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
    """Makes one run and returns its supervisor's report. None: the supervisor was killed during the run.

    Raises:
        VerifierError: the run did not begin.
        TimeoutError: no report came within ``limit_s`` + ``GRACE_S``.
    """
    loop, received, content = asyncio.get_running_loop(), bytearray(), marshal.dumps(specification)
    with jail.connect() as connection:
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                await loop.sock_sendall(connection, struct.pack("<Q", len(content)) + content)
                while chunk := await loop.sock_recv(connection, RECEIVE_BYTES):
                    received += chunk
        except ConnectionError as failure:
            log.warning("event=supervisor_lost error=%s", failure)
    *lines, _ = received.split(b"\n")  # one when it starts, one when it ends
    if not lines:
        raise VerifierError("the sandbox could not run the program: its supervisor ended before the run")
    return json.loads(lines[1]) if len(lines) > 1 else None


def start_jail(modes: Sequence[str]) -> tuple[str, Jail]:
    """Starts a jail in the first mode that works here, and returns both."""
    failures = []
    for mode in modes:
        try:
            jail = Jail(mode)
        except (VerifierError, OSError) as failure:
            failures.append(f"{mode}: {failure}")
            continue
        log.info("event=sandbox_started mode=%s", mode)
        return mode, jail
    raise VerifierError(
        "programs cannot be isolated on this machine: run as root with CAP_SYS_ADMIN, allow user namespaces, or set "
        f"sandbox_endpoint ({'; '.join(failures)})"
    )


def as_outcome(report: dict[str, Any]) -> Outcome:
    return Outcome(
        ended=report["ended"],
        exit_code=report["exit_code"],
        seconds=report["seconds"],
        stdout=base64.b64decode(report["stdout"]).decode(errors="replace"),
        stderr=base64.b64decode(report["stderr"]).decode(errors="replace"),
    )
