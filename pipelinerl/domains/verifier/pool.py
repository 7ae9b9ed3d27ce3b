"""A fixed number of worker processes behind one coroutine, ``JudgePool.judge``, which returns a verdict in any case.

A *forkserver* process imports the judges once and forks all workers, so a killed worker is replaced in milliseconds.
``Lanes`` decides which check runs next, and for how long. A check waits for a worker without limit, and for its reply
as long as the worker gets CPU time.
"""

import asyncio
import collections
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import psutil

from pipelinerl.domains.verifier.worker import HEADER, REQUEST
from pipelinerl.errors import VerifierError
from pipelinerl.records.verdicts import Check, Verdict, error, unparsable

STARTUP_TIMEOUT_S = 120.0
"""The judges' imports take seconds, from a cold network file system a minute."""
KILL_GRACE_S = 0.5
"""CPU seconds past its limit, but at most the limit again, after which a worker is killed: it did not stop itself."""
LONGEST_PAUSE_S = 0.1
"""Interval of looking at a worker's CPU clock, where it is not about to reach its limit."""
WALL_FACTOR = 6
LEAST_SHARE = 0.01
"""A check is starved if it gets less than this share of its CPU limit in ``WALL_FACTOR`` times the limit of wall time:
a machine on which 600 processes share each core. Any running check gets more."""
CPUCLOCK_SCHED = 2
"""Linux's clock of all CPU time of a process, as in ``clock_getcpuclockid``."""
PASSED_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONUTF8", "LANG", "LC_ALL", "TMPDIR", "HOME")
"""The environment variables that judges get, none of which holds a secret."""
MAX_CHECKS = 2000
"""Checks after which a worker is replaced, so that the judges' caches do not grow forever."""
SLICES_S = (0.003, 0.01, 0.03, 0.1)
"""CPU seconds. 95 % of the answers in the tables of `tests/unit/domains/math_answers` need less than the first.

Each is about three times the one before, so that a check costs at most 2.5 times as much as in one slice. Nothing of an
interrupted check is kept: a stopped process would hold its memory."""

T = TypeVar("T")


class Lanes(Generic[T]):
    """The checks that wait for a worker, in one queue per slice of CPU time. Pure: no clocks, no processes.

    A check's cost is not known beforehand, so each first gets the shortest slice. One that uses it up starts again with
    the next longer slice, and at last with the whole limit. A free worker takes a check with the shortest slice, and of
    these the one that has waited longest. So expensive checks delay the others by their first slices only.

    Args:
        workers: number of workers.
        timeout_s: the limit of one check in CPU seconds.
    """

    def __init__(self, *, workers: int, timeout_s: float):
        self.limits_s = (*(slice_s for slice_s in SLICES_S if slice_s < timeout_s), timeout_s)
        """CPU seconds that a check gets in each lane."""
        self._waiting: list[collections.deque[T]] = [collections.deque() for _ in self.limits_s]
        self._num_running = [0] * len(self.limits_s)
        # The slow lane never takes the last of several workers: short checks do not wait for it.
        self._most_running = [workers if limit_s <= SLICES_S[-1] else max(1, workers - 1) for limit_s in self.limits_s]

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def wait(self, lane: int, check: T) -> None:
        """Puts a check at the end of its lane."""
        self._waiting[lane].append(check)

    def leave(self, lane: int, check: T) -> None:
        """Removes a check, if it still waits."""
        with contextlib.suppress(ValueError):
            self._waiting[lane].remove(check)

    def start_next(self) -> tuple[int, T] | None:
        """Returns lane and check that a free worker runs now, and counts it as running. None: it runs nothing."""
        for lane, waiting in enumerate(self._waiting):
            if waiting and self._num_running[lane] < self._most_running[lane]:
                self._num_running[lane] += 1
                return lane, waiting.popleft()
        return None

    def end(self, lane: int) -> None:
        """Counts a check of the lane as no longer running."""
        self._num_running[lane] -= 1


@dataclass(eq=False)
class Worker:
    process: psutil.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    checks: int = 0
    dead: bool = False

    @property
    def cpu_s(self) -> float:
        """CPU seconds used so far, from the clock of the process. Raises ``OSError`` if the process is gone."""
        return time.clock_gettime(~self.process.pid << 3 | CPUCLOCK_SCHED)

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
    """The worker got hardly any CPU."""


class JudgePool:
    """The pool of workers. Use it as an async context manager.

    Args:
        workers: number of worker processes.
        timeout_s: CPU time of one check.
        memory_mb: memory of one worker.
        judges: dotted names of judges besides the verifier's own (`verifier.judges`).
    """

    def __init__(self, *, workers: int, timeout_s: float, memory_mb: int, judges: Sequence[str] = ()):
        self.num_workers = workers
        self.judges = judges
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._idle: list[Slot] = []
        self._lanes: Lanes[asyncio.Future[Slot]] = Lanes(workers=workers, timeout_s=timeout_s)
        self._forkserver: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._spawning = asyncio.Lock()
        self._alive: set[Worker] = set()
        self._closed = False

    async def __aenter__(self) -> "JudgePool":
        for _ in range(self.num_workers):
            self._idle.append(Slot(await self._spawn()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        async with self._spawning:
            pass
        for worker in list(self._alive):
            worker.kill()
        await self._stop_forkserver()

    async def judge(self, check: Check) -> Verdict:
        """Judges one check. A cancelled one leaves its lane.

        Returns:
            The judge's verdict. ``unparsable`` where the check uses up its CPU time, or kills two workers. ``error``
            where the worker gets hardly any CPU time (``LEAST_SHARE``): the machine is overloaded.
        Raises:
            VerifierError: workers can no longer be started.
        """
        for lane in range(len(self._lanes.limits_s)):
            verdict = await self._judge_in_lane(check, lane)
            if verdict is not None:
                return verdict
        return unparsable("time limit")

    @property
    def queued(self) -> int:
        """Number of checks that wait for a worker."""
        return len(self._lanes)

    async def _judge_in_lane(self, check: Check, lane: int) -> Verdict | None:
        """Judges with the limit of one lane. None: the check used it up."""
        slot = await self._take_slot(lane)
        try:
            return await self._judge_in(slot, check, self._lanes.limits_s[lane])
        except asyncio.CancelledError:
            slot.worker.kill()  # otherwise its verdict would be read as the next check's
            raise
        finally:
            self._release_slot(slot, lane)

    async def _take_slot(self, lane: int) -> Slot:
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._lanes.wait(lane, waiter)
        self._give_slots()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._lanes.leave(lane, waiter)
            else:
                self._release_slot(waiter.result(), lane)
            raise

    def _release_slot(self, slot: Slot, lane: int) -> None:
        self._lanes.end(lane)
        self._idle.append(slot)
        self._give_slots()

    def _give_slots(self) -> None:
        while self._idle and (started := self._lanes.start_next()) is not None:
            lane, waiter = started
            if waiter.cancelled():  # its task has not yet run since, and so has not left the lane
                self._lanes.end(lane)
            else:
                waiter.set_result(self._idle.pop())

    async def _judge_in(self, slot: Slot, check: Check, limit_s: float) -> Verdict | None:
        for _ in range(2):
            if slot.worker.dead or slot.worker.checks >= MAX_CHECKS:
                slot.worker.kill()
                self._alive.discard(slot.worker)
                slot.worker = await self._spawn()
            try:
                return await self._ask(slot.worker, check, limit_s)
            except WorkerDiedError:
                slot.worker.kill()
            except CpuLimitError:
                slot.worker.kill()
                return None
            except StarvedError:
                slot.worker.kill()
                return error(f"the judge got hardly any CPU within {self.timeout_s * WALL_FACTOR:g} s")
        return unparsable("the judge dies of it")

    async def _ask(self, worker: Worker, check: Check, limit_s: float) -> Verdict | None:
        worker.checks += 1
        loop = asyncio.get_running_loop()
        deadline, cpu_at_deadline_s = loop.time() + self.timeout_s * WALL_FACTOR, self.timeout_s * LEAST_SHARE
        left_s = killed_at_s = limit_s + min(limit_s, KILL_GRACE_S)
        reply = asyncio.ensure_future(self._exchange(worker, msgspec.json.encode(check), limit_s))
        try:
            cpu_before_s = worker.cpu_s
            while True:
                done, _ = await asyncio.wait({reply}, timeout=min(max(left_s, 0.001), LONGEST_PAUSE_S))
                if done:
                    return msgspec.json.decode(reply.result(), type=Verdict) if reply.result() else None
                used_s = worker.cpu_s - cpu_before_s
                left_s = killed_at_s - used_s
                if left_s <= 0:
                    raise CpuLimitError
                if loop.time() > deadline:
                    if used_s < cpu_at_deadline_s:
                        raise StarvedError
                    deadline, cpu_at_deadline_s = (
                        loop.time() + self.timeout_s * WALL_FACTOR,
                        used_s + self.timeout_s * LEAST_SHARE,
                    )
        except (OSError, asyncio.IncompleteReadError) as failure:
            raise WorkerDiedError from failure
        finally:
            reply.cancel()

    async def _exchange(self, worker: Worker, payload: bytes, limit_s: float) -> bytes:
        worker.writer.write(REQUEST.pack(len(payload), limit_s) + payload)
        await worker.writer.drain()
        (length,) = HEADER.unpack(await worker.reader.readexactly(HEADER.size))
        return await worker.reader.readexactly(length)

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
                "pipelinerl.domains.verifier.worker",
                str(theirs.fileno()),
                str(self.memory_mb),
                *self.judges,
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
