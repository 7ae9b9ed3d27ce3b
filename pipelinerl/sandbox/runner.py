"""The outside of the sandbox: starts a jail per program, reads its reports, ends it in time, cleans up.

Consumes programs, emits outcomes. Waits for: a free slot (``concurrency``), then the jail's reports, bounded by the
limits and, should the jail itself hang, by ``GRACE_S`` more; then everything is killed.
"""

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipelinerl.errors import VerifierError
from pipelinerl.sandbox.modes import MODES, draw_uid, interpreter, jail_command, readable_paths

log = logging.getLogger(__name__)

GRACE_S = 10.0
MAX_FAILURE_CHARS = 500

Ended = Literal["exited", "signal", "time", "memory", "disk", "output"]


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
    processes: int = 32
    output_kb: int = 1024


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen of one run."""

    ended: Ended
    """exited by itself, or by a signal, or what it had too much of."""
    exit_code: int
    seconds: float
    stdout: str
    stderr: str
    """Its last few KiB."""


class Sandbox:
    """Runs programs, ``concurrency`` at a time.

    Example:
        >>> sandbox = Sandbox()
        >>> # (outcome,) = await sandbox.run_python("print(input()[::-1])", ["abc"]); outcome.stdout == "cba\\n"
    """

    def __init__(self, *, limits: Limits | None = None, concurrency: int | None = None, mode: str | None = None):
        self.limits = limits or Limits()
        self.mode = mode
        self._slots = asyncio.Semaphore(concurrency or len(os.sched_getaffinity(0)))
        self._choosing = asyncio.Lock()

    async def run_python(self, code: str, stdins: Sequence[str], *, stop_on_failure: bool = False) -> list[Outcome]:
        """Runs a Python program once per standard input; fewer outcomes than inputs mean that a run did not end well.

        Raises:
            VerifierError: the sandbox itself failed, which says nothing about the program.
        """
        async with self._slots:
            mode = await self._chosen_mode()
            return await self._run(mode, code, stdins, stop_on_failure)

    async def _chosen_mode(self) -> str:
        """The strongest means that works here, found by trying."""
        async with self._choosing:
            if self.mode is None:
                self.mode = await self._find_mode()
                log.info("sandbox mode=%s", self.mode)
            return self.mode

    async def _find_mode(self) -> str:
        failures = []
        for mode in MODES:
            try:
                (outcome,) = await self._run(mode, "print('ready')", [""], False)
            except (VerifierError, FileNotFoundError, ValueError) as failure:
                failures.append(f"{mode}: {failure}")
                continue
            if outcome.stdout == "ready\n":
                return mode
            failures.append(f"{mode}: {outcome}")
        raise VerifierError(
            "programs cannot be isolated on this machine: install bubblewrap, allow user namespaces, or set "
            f"sandbox_endpoint ({'; '.join(failures)})"
        )

    async def _run(self, mode: str, code: str, stdins: Sequence[str], stop_on_failure: bool) -> list[Outcome]:
        root = tempfile.mkdtemp(prefix="pipelinerl-sandbox-")
        read_end, write_end = os.pipe()
        try:
            specification = self._specification(mode, root, write_end, code, stdins, stop_on_failure)
            process = await asyncio.create_subprocess_exec(
                *jail_command(mode, self.limits.disk_mb),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                cwd=root,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                pass_fds=[write_end],
                start_new_session=True,
            )
            os.close(write_end)
            write_end = -1
            try:
                return await self._collect(process, read_end, specification)
            finally:
                await end_group(process)
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)
            await remove_tree(root)

    def _specification(
        self, mode: str, root: str, report_fd: int, code: str, stdins: Sequence[str], stop_on_failure: bool
    ) -> bytes:
        readable = readable_paths()
        specification: dict[str, Any] = {
            "mode": mode,
            "root": root,
            "report_fd": report_fd,
            "uid": draw_uid(),
            "readable": readable,
            "files": {"solution.py": code},
            "command": [interpreter(), "-s", "-B", "solution.py"],
            "stdins": list(stdins),
            "stop_on_failure": stop_on_failure,
            "limits": asdict(self.limits),
            "env": {
                "PATH": "/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "HOME": "/tmp",
                "PYTHONPATH": os.pathsep.join(path for path in readable if path.endswith("-packages")),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        }
        return json.dumps(specification).encode("utf-8", "surrogatepass")

    async def _collect(self, process: asyncio.subprocess.Process, read_end: int, specification: bytes) -> list[Outcome]:
        reports = asyncio.create_task(asyncio.to_thread(read_all, read_end))
        try:
            async with asyncio.timeout(self.limits.total_s + GRACE_S):
                _, stderr = await process.communicate(specification)
        except TimeoutError:
            stderr = b"the jail did not end in time"
        finally:
            await end_group(process)
            content = await reports
        outcomes = [parse_report(line) for line in content.splitlines()]
        if not outcomes:
            text = stderr.decode(errors="replace").strip()[-MAX_FAILURE_CHARS:]
            raise VerifierError(f"the sandbox could not run the program: {text or 'no report'}")
        return outcomes


def read_all(descriptor: int) -> bytes:
    """Everything until the last writer closes; the jail's processes are its only writers."""
    parts = []
    while chunk := os.read(descriptor, 1 << 16):
        parts.append(chunk)
    return b"".join(parts)


async def remove_tree(folder: str) -> None:
    """By `rm`, which goes as deep as any program may have gone; `shutil.rmtree` does not."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # where the program's files were in memory of its own
        return
    remover = await asyncio.create_subprocess_exec("rm", "-rf", "--", folder, stderr=asyncio.subprocess.DEVNULL)
    await remover.wait()


async def end_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def parse_report(line: bytes) -> Outcome:
    report = json.loads(line)
    return Outcome(
        ended=report["ended"],
        exit_code=report["exit_code"],
        seconds=report["seconds"],
        stdout=base64.b64decode(report["stdout"]).decode(errors="replace"),
        stderr=base64.b64decode(report["stderr"]).decode(errors="replace"),
    )
