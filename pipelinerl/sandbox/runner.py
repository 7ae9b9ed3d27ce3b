"""The outside of the sandbox: keeps one jail per mode, sends it programs, reads what was seen of them.

Consumes programs, emits outcomes. Waits for: a free slot (``concurrency``), then the runs' outcomes, bounded by
``Limits.total_s`` and ``GRACE_S`` more. Closing a program's connection ends all its processes.
"""

import asyncio
import base64
import json
import logging
import os
import secrets
import socket
import struct
import subprocess
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipelinerl.errors import VerifierError
from pipelinerl.sandbox.modes import FIRST_UID, INSIDE, MODES, NUM_UIDS, check_mode, interpreter, readable_paths

log = logging.getLogger(__name__)

START_S = 30.0
GRACE_S = 10.0
STOP_S = 5.0
MAX_LINE = 1 << 30

Ended = Literal["exited", "signal", "time", "memory", "output"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one program. Memory and processes count everything that the program starts."""

    cpu_s: int = 10
    """CPU seconds of one process."""
    wall_s: float = 15.0
    """Wall seconds of one run."""
    total_s: float = 60.0
    """Wall seconds of all runs of the program."""
    memory_mb: int = 1024
    disk_mb: int = 64
    """Size of each of the two folders that can be written. A full one answers as a full disk does."""
    processes: int = 32
    output_kb: int = 1024


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen of one run."""

    ended: Ended
    """exited by itself, or by a signal, or the limit that it passed."""
    exit_code: int
    seconds: float
    stdout: str
    stderr: str
    """Its last few KiB."""


KILLED = Outcome(ended="signal", exit_code=-9, seconds=0.0, stdout="", stderr="")
"""A run whose supervisor ended before the run, because its program exhausted the machine."""


class Jail:
    """One jail process. It forks for every program and lives until it is closed.

    Raises:
        VerifierError: this machine does not allow the mode.
    """

    def __init__(self, mode: str):
        self._control, theirs = socket.socketpair()
        command = [interpreter(), "-E", "-s", "-B", str(INSIDE / "jail.py"), mode, str(draw_uid()), *readable_paths()]
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
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
        try:
            answer = self._control.recv(4096).decode().strip()
        except TimeoutError:
            answer = f"the jail did not start within {START_S:g} s"
        if answer != "ready":
            self.close()
            raise VerifierError(f"the sandbox did not start: {answer or 'the jail ended'}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        """A connection to a supervisor of its own."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"p"], [theirs.fileno()])
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
        ValueError: a mode that does not hold what the sandbox promises.

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
        self._jail: Jail | None = None
        self._end: weakref.finalize | None = None

    async def run_python(self, code: str, stdins: Sequence[str], *, stop_on_failure: bool = False) -> list[Outcome]:
        """Runs a Python program once per standard input. It stops after a run that did not end well.

        Raises:
            VerifierError: the sandbox itself failed, which says nothing about the program.
        """
        async with self._slots:
            connection = (await self._started()).connect()
            with connection:
                return await self._run(connection, self._specification(code, stdins, stop_on_failure))

    def close(self) -> None:
        """Ends the jail. The next program starts another one."""
        if self._end is not None:
            self._end()
        self._jail = self._end = None

    async def _started(self) -> Jail:
        """The jail, started in the strongest mode that works here, and again when it died."""
        async with self._starting:
            if self._jail is None or not self._jail.is_alive:
                self.close()
                self.mode, jail = await asyncio.to_thread(start_jail, (self.mode,) if self.mode else MODES)
                self._jail, self._end = jail, weakref.finalize(self, jail.close)
            return self._jail

    def _specification(self, code: str, stdins: Sequence[str], stop_on_failure: bool) -> bytes:
        limits = asdict(self.limits)
        if self.mode == "user":  # one user for all programs: the kernel counts their processes together
            limits["processes"] = (self.limits.processes + 2) * self._concurrency + 1
        specification: dict[str, Any] = {
            "uid": draw_uid(),
            "code": code,
            "stdins": list(stdins),
            "stop_on_failure": stop_on_failure,
            "limits": limits,
        }
        return json.dumps(specification).encode("utf-8", "surrogatepass")

    async def _run(self, connection: socket.socket, specification: bytes) -> list[Outcome]:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE)
        outcomes: list[Outcome] = []
        started = False
        try:
            async with asyncio.timeout(self.limits.total_s + GRACE_S):
                writer.write(struct.pack("<Q", len(specification)) + specification)
                while line := await reader.readline():
                    message = json.loads(line)
                    started = "started" in message
                    if not started:
                        outcomes.append(as_outcome(message))
        except TimeoutError:
            started = True
        except ConnectionError as failure:
            log.warning("event=supervisor_lost error=%s", failure)
        finally:
            writer.transport.abort()
        if started:
            outcomes.append(KILLED)
        if not outcomes:
            raise VerifierError("the sandbox could not run the program: its supervisor ended before the first run")
        return outcomes


def start_jail(modes: Sequence[str]) -> tuple[str, Jail]:
    """The first of the modes that works here, and its jail."""
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


def draw_uid() -> int:
    """A user of its own for a program, so that programs share no limits."""
    return FIRST_UID + secrets.randbelow(NUM_UIDS)


def as_outcome(report: dict[str, Any]) -> Outcome:
    return Outcome(
        ended=report["ended"],
        exit_code=report["exit_code"],
        seconds=report["seconds"],
        stdout=base64.b64decode(report["stdout"]).decode(errors="replace"),
        stderr=base64.b64decode(report["stderr"]).decode(errors="replace"),
    )
