"""A fixed number of worker processes behind one coroutine, ``JudgePool.judge``.

A *forkserver* process imports the judges once and forks all workers, so that a killed worker is replaced in
milliseconds. ``judge`` returns a verdict even if the check harms its worker. CPU time beyond the limit gives
``unparsable``. If the worker dies, the check is repeated on a new worker, and a second death is blamed on the answer
(``unparsable``). If the worker gets no CPU because the machine is overloaded, the verdict is ``error``.

``judge`` first waits for an idle worker, which any finished check provides. Then it waits for the worker's reply, at
most ``WALL_FACTOR`` times the CPU limit.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass

import msgspec
import psutil

from pipelinerl.errors import VerifierError
from pipelinerl.records.verdicts import Check, Verdict, error, unparsable
from pipelinerl.verifier.worker import HEADER

STARTUP_TIMEOUT_S = 120.0
KILL_GRACE_S = 0.5
"""CPU seconds beyond the limit after which a worker is killed that has not interrupted itself."""
WALL_FACTOR = 6
"""A check may last this many times its CPU limit in wall time before it counts as starved."""
PASSED_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR", "HOME")
"""The environment variables that judges get. None holds a secret."""
MAX_CHECKS = 2000
"""Checks after which a worker is replaced, so that the judges' caches do not grow forever."""


@dataclass(eq=False)
class Worker:
    process: psutil.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    checks: int = 0
    dead: bool = False

    @property
    def cpu_s(self) -> float:
        """CPU seconds used so far. Infinite if the process is gone."""
        try:
            times = self.process.cpu_times()
        except psutil.NoSuchProcess:
            return float("inf")
        return times.user + times.system

    def kill(self) -> None:
        self.dead = True
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.send_signal(signal.SIGKILL)
        self.writer.close()


@dataclass(eq=False)
class Slot:
    """A place for one worker. A dead worker is replaced when its slot is used next."""

    worker: Worker


class WorkerDiedError(Exception):
    """The channel closed before the verdict arrived."""


class CpuLimitError(Exception):
    """The worker used up its CPU time and did not interrupt itself."""


class StarvedError(Exception):
    """The worker got no CPU within the wall limit."""


class JudgePool:
    """The pool of workers. Use it as an async context manager.

    Args:
        workers: number of worker processes.
        timeout_s: CPU time of one check.
        memory_mb: memory of one worker.
    """

    def __init__(self, *, workers: int, timeout_s: float, memory_mb: int):
        self.num_workers = workers
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self.queued = 0
        self._idle: asyncio.Queue[Slot] = asyncio.Queue()
        self._forkserver: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._spawning = asyncio.Lock()
        self._alive: set[Worker] = set()
        self._closed = False

    async def __aenter__(self) -> "JudgePool":
        for _ in range(self.num_workers):
            self._idle.put_nowait(Slot(await self._spawn()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        async with self._spawning:
            pass
        for worker in list(self._alive):
            worker.kill()
        await self._stop_forkserver()

    async def judge(self, check: Check) -> Verdict:
        """Judges one check. Waits without limit for an idle worker.

        Raises:
            VerifierError: workers can no longer be started.
        """
        self.queued += 1
        try:
            slot = await self._idle.get()
        finally:
            self.queued -= 1
        try:
            return await self._judge_in(slot, check)
        except asyncio.CancelledError:
            slot.worker.kill()  # otherwise its verdict would be read as the next check's
            raise
        finally:
            self._idle.put_nowait(slot)

    async def _judge_in(self, slot: Slot, check: Check) -> Verdict:
        for _ in range(2):
            if slot.worker.dead or slot.worker.checks >= MAX_CHECKS:
                await self._refill(slot)
            try:
                return await self._ask(slot.worker, check)
            except WorkerDiedError:
                slot.worker.kill()
            except CpuLimitError:
                slot.worker.kill()
                return unparsable("time limit")
            except StarvedError:
                slot.worker.kill()
                return error(f"the judge got no CPU within {self.timeout_s * WALL_FACTOR:g} s")
        return unparsable("the judge dies of it")

    async def _ask(self, worker: Worker, check: Check) -> Verdict:
        worker.checks += 1
        cpu_before = worker.cpu_s
        reply = asyncio.ensure_future(self._exchange(worker, msgspec.json.encode(check)))
        deadline = asyncio.get_running_loop().time() + self.timeout_s * WALL_FACTOR
        pause_s = self.timeout_s + KILL_GRACE_S
        try:
            while True:
                done, _ = await asyncio.wait({reply}, timeout=pause_s)
                if done:
                    return msgspec.json.decode(reply.result(), type=Verdict)
                if worker.cpu_s - cpu_before >= self.timeout_s + KILL_GRACE_S:
                    raise CpuLimitError
                if asyncio.get_running_loop().time() > deadline:
                    raise StarvedError
                pause_s = 0.1
        except (OSError, asyncio.IncompleteReadError) as failure:
            raise WorkerDiedError from failure
        finally:
            reply.cancel()

    async def _exchange(self, worker: Worker, payload: bytes) -> bytes:
        worker.writer.write(HEADER.pack(len(payload)) + payload)
        await worker.writer.drain()
        (length,) = HEADER.unpack(await worker.reader.readexactly(HEADER.size))
        return await worker.reader.readexactly(length)

    async def _refill(self, slot: Slot) -> None:
        slot.worker.kill()
        self._alive.discard(slot.worker)
        slot.worker = await self._spawn()

    async def _spawn(self) -> Worker:
        ours, theirs = socket.socketpair()
        try:
            async with self._spawning:
                pid = await self._fork(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = Worker(psutil.Process(pid), reader, writer)
        self._alive.add(worker)
        return worker

    async def _fork(self, channel: socket.socket) -> int:
        """Asks the forkserver for a worker on ``channel`` and returns its process id. Restarts a dead forkserver."""
        for _ in range(2):
            if self._closed:
                raise VerifierError("the verifier is stopping")
            if self._control is None:
                await self._start_forkserver()
            try:
                return await asyncio.to_thread(self._request_fork, channel)
            except (OSError, ValueError):
                await self._stop_forkserver()
        raise VerifierError("the verifier cannot start workers: see its log")

    def _request_fork(self, channel: socket.socket) -> int:
        assert self._control is not None, "the forkserver is started first"
        socket.send_fds(self._control, [b"fork"], [channel.fileno()])
        return int(self._control.recv(32))

    async def _start_forkserver(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(STARTUP_TIMEOUT_S)
        with theirs:
            self._forkserver = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pipelinerl.verifier.worker",
                str(theirs.fileno()),
                str(self.timeout_s),
                str(self.memory_mb),
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in os.environ.items() if name in PASSED_VARIABLES},
            )
        self._control = ours
        if await asyncio.to_thread(ours.recv, 16) != b"ready":
            await self._stop_forkserver()
            raise VerifierError("the verifier's judges cannot be imported: see its log")

    async def _stop_forkserver(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._forkserver is not None:
            with contextlib.suppress(ProcessLookupError):
                self._forkserver.kill()
            await self._forkserver.wait()
            self._forkserver = None
