"""Worker processes: each runs rollouts in its own asyncio loop and talks to the actor over a pipe.

A worker loads the domain and the tokenizer itself, from the run folder; problems and results travel as msgpack. A
worker that dies (a domain can take its process down) is noticed, replaced, and the work it had is named to the caller,
who decides what is tried again. One whose heartbeat ends is killed. Workers die with the actor.
"""

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from pipelinerl.actor.messages import (
    AttemptEnded,
    Beat,
    Cancel,
    FromWorker,
    GroupFinished,
    Ready,
    Servers,
    StartGroup,
    Stop,
    ToWorker,
    WorkerFailed,
)
from pipelinerl.errors import DomainError, StreamError
from pipelinerl.streams.codec import Codec

log = logging.getLogger(__name__)

_to_worker: Codec[ToWorker] = Codec(ToWorker)
_from_worker: Codec[FromWorker] = Codec(FromWorker)
STOP_TIMEOUT_S = 2.0
BEAT_S = 2.0
PAUSE_S = 5.0
"""After a longer pause between two polls a worker's silence proves nothing: nobody listened."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The work of a worker that died."""

    tickets: tuple[int, ...]
    exit_code: int | None


@dataclass(eq=False)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    index: int
    heard: float
    """Time of the newest message, on the monotonic clock."""
    ready: bool = False
    load: dict[int, int] = field(default_factory=dict)
    """Ticket → rollouts still under way."""

    @property
    def rollouts(self) -> int:
        return sum(self.load.values())


class WorkerPool:
    """The actor's workers. Used by one thread.

    Consumes results of the pipes in ``poll``, produces ``GroupFinished`` and ``Lost``; raises ``DomainError`` when a
    worker reports that it cannot work at all. ``close`` ends the processes.

    Args:
        silence_s: a worker that is silent for this long is frozen and gets killed.
    """

    def __init__(self, run_dir: Path, job_name: str, num_workers: int, silence_s: float):
        self._context = multiprocessing.get_context("spawn")
        self._run_dir, self._job_name, self._silence_s = run_dir, job_name, silence_s
        self._polled = time.monotonic()
        self._servers = Servers(version=0, urls={})
        self._workers = [self._spawn(index) for index in range(num_workers)]

    @property
    def num_rollouts(self) -> int:
        """Rollouts under way."""
        return sum(worker.rollouts for worker in self._workers)

    def set_servers(self, servers: Servers) -> None:
        """Tells every worker, also those to come, which servers are in service."""
        self._servers = servers
        for worker in self._workers:
            self._send(worker, servers)

    def start(self, start: StartGroup) -> None:
        """Gives the work to the least loaded worker."""
        payload = encode_start(start)
        worker = min(self._workers, key=lambda worker: worker.rollouts)
        worker.load[start.ticket] = len(start.attempts)
        self._send_bytes(worker, payload)

    def cancel(self, ticket: int) -> None:
        for worker in self._workers:
            if worker.load.pop(ticket, None) is not None:
                self._send(worker, Cancel(ticket=ticket))

    def poll(self, timeout_s: float) -> list[GroupFinished | Lost]:
        """What came to an end; waits up to ``timeout_s`` for the first."""
        ready = wait([worker.connection for worker in self._workers], timeout_s)
        results: list[GroupFinished | Lost] = []
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            results += self._drain(worker)
        self._kill_silent()
        return results

    def _kill_silent(self) -> None:
        """The end of a killed worker is noticed by the next poll."""
        now = time.monotonic()
        paused, self._polled = now - self._polled > PAUSE_S, now
        for worker in self._workers:
            if paused:
                worker.heard = now
            elif now - worker.heard > self._silence_s:
                log.error(
                    "worker frozen index=%d silent_s=%.0f (launcher.heartbeat_timeout_s=%g): it is killed",
                    *(worker.index, now - worker.heard, self._silence_s),
                )
                worker.heard = now
                worker.process.kill()

    def close(self) -> None:
        for worker in self._workers:
            self._send(worker, Stop())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.connection.close()

    def _spawn(self, index: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=worker_main,
            args=(str(self._run_dir), self._job_name, theirs, index),
            name=f"{self._job_name}-worker-{index}",
            daemon=True,
        )
        process.start()
        theirs.close()
        worker = _Worker(process=process, connection=ours, index=index, heard=time.monotonic())
        self._send(worker, self._servers)
        return worker

    def _drain(self, worker: _Worker) -> list[GroupFinished | Lost]:
        results: list[GroupFinished | Lost] = []
        try:
            while worker.connection.poll():
                message = _from_worker.decode(worker.connection.recv_bytes())
                worker.heard = time.monotonic()
                match message:
                    case Ready():
                        worker.ready = True
                    case WorkerFailed():
                        raise DomainError(message.error)
                    case AttemptEnded():
                        if message.ticket in worker.load:
                            worker.load[message.ticket] -= 1
                    case GroupFinished():
                        if worker.load.pop(message.ticket, None) is not None:
                            results.append(message)
        except (EOFError, OSError):
            results.append(self._replace(worker))
        return results

    def _replace(self, worker: _Worker) -> Lost:
        worker.process.join(STOP_TIMEOUT_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
        lost = Lost(tickets=tuple(worker.load), exit_code=worker.process.exitcode)
        log.error("worker died index=%d exit_code=%s groups=%d", worker.index, lost.exit_code, len(lost.tickets))
        if not worker.ready:
            raise DomainError(
                f"a rollout worker ended with exit code {lost.exit_code} while it loaded the domain: see the log above"
            )
        self._workers[self._workers.index(worker)] = self._spawn(worker.index)
        return lost

    def _send(self, worker: _Worker, message: ToWorker) -> None:
        self._send_bytes(worker, _to_worker.encode(message))

    def _send_bytes(self, worker: _Worker, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed in poll
            worker.connection.send_bytes(payload)


def encode_start(start: StartGroup) -> bytes:
    """The message's bytes; a problem that holds something else than plain data is the domain's mistake."""
    try:
        return _to_worker.encode(start)
    except StreamError as error:
        keys = {key: type(value).__name__ for key, value in start.problem.items()}
        raise DomainError(
            f"a problem holds a value that cannot be sent to a worker ({error}); its fields: {keys}; "
            "problems must consist of strings, numbers, lists, dicts and numpy arrays"
        ) from error


def worker_main(run_dir: str, job_name: str, connection: Connection, index: int) -> None:
    """Entry of the process. Ends on ``Stop``, when the pipe closes, or with ``WorkerFailed``."""
    from pipelinerl.observability.logging import setup_role_logging
    from pipelinerl.observability.role import die_with_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    setup_role_logging(f"{job_name}.worker{index}")
    lock = threading.Lock()

    def report(message: FromWorker) -> None:
        with lock:
            connection.send_bytes(_from_worker.encode(message))

    threading.Thread(target=_beat, args=(report,), name="beat", daemon=True).start()
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(Path(run_dir), connection, report))
    except Exception as error:  # the process boundary
        log.exception("worker failed")
        with contextlib.suppress(OSError):
            report(WorkerFailed(error=f"{type(error).__name__}: {error}"))
        os._exit(1)
    os._exit(0)


def _beat(report: Callable[[FromWorker], None]) -> None:
    """A thread's sign of life, for a domain may keep the loop busy. Ends with the pipe."""
    with contextlib.suppress(OSError):
        while True:
            report(Beat())
            time.sleep(BEAT_S)


async def _serve(run_dir: Path, connection: Connection, report: Callable[[FromWorker], None]) -> None:
    """Consumes messages of the actor, starts groups, reports what finished."""
    import aiohttp

    from pipelinerl.actor.scheduler import Scheduler, WorkSet
    from pipelinerl.actor.setup import load_rollout_side

    side = load_rollout_side(run_dir)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        scheduler = Scheduler(side.cfg, side.functions, side.llms, session, side.settings)
        work = WorkSet(scheduler, report)
        report(Ready())
        async for message in _messages(connection):
            match message:
                case Servers():
                    scheduler.pool.update(message.urls)
                case StartGroup():
                    work.start(message)
                case Cancel():
                    work.cancel(message.ticket)
                case Stop():
                    break
        await work.close()


async def _messages(connection: Connection) -> Any:
    """The actor's messages, until the pipe closes."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection.fileno(), readable.set)
    try:
        while True:
            await readable.wait()
            readable.clear()
            try:
                while connection.poll():
                    yield _to_worker.decode(connection.recv_bytes())
            except (EOFError, OSError):
                return
    finally:
        loop.remove_reader(connection.fileno())


def require_coroutines(functions: Iterable[Callable]) -> None:
    """A rollout function must be ``async def``."""
    for function in functions:
        if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)):
            name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
            raise DomainError(f"{name} is not a coroutine function: define it with `async def`")
