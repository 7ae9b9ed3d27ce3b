"""The actor's view of its worker processes: which worker has which work, and which are alive.

A worker that dies or whose heartbeat stops is replaced. The caller decides whether to retry its work.
"""

import contextlib
import logging
import multiprocessing
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.actor.connection import ActorConnection
from pipelinerl.actor.messages import (
    FROM_WORKER,
    TO_WORKER,
    Cancel,
    Failure,
    FromWorker,
    GroupEnded,
    GroupFinished,
    Ready,
    RolloutDone,
    RolloutFailed,
    Sampling,
    Servers,
    StartGroup,
    Stop,
    ToWorker,
    WorkerFailed,
    encode_start,
)
from pipelinerl.actor.worker import worker_main
from pipelinerl.errors import DomainError
from pipelinerl.records import Rollout

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0
"""Time in which all workers must end after `Stop`. Then they are killed."""
PAUSE_S = 5.0
"""After a longer pause between two polls, an old heartbeat may only mean that the whole machine stood still. The time
allowed for silence then starts again."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The work of a worker that died."""

    task_ids: tuple[int, ...]
    exit_code: int | None


@dataclass(eq=False)
class _Group:
    """The outcomes of a piece of work so far."""

    missing: int
    """Attempts still running."""
    rollouts: list[Rollout] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(eq=False)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: ActorConnection
    index: int
    heartbeat: Any
    """Shared double: time of the newest heartbeat, on the monotonic clock."""
    ready: bool = False
    groups: dict[int, _Group] = field(default_factory=dict)
    """By task id."""
    rollouts: int = 0
    """Running rollouts."""

    def add(self, task_id: int, attempts: int) -> None:
        self.groups[task_id] = _Group(missing=attempts)
        self.rollouts += attempts

    def remove(self, task_id: int) -> bool:
        """Forgets a group. Returns False if this worker does not have it."""
        group = self.groups.pop(task_id, None)
        if group is not None:
            self.rollouts -= group.missing
        return group is not None

    def count(self, task_id: int, outcome: Rollout | Failure) -> None:
        """Counts an attempt that has ended. Ignores a group that this worker does not have."""
        group = self.groups.get(task_id)
        if group is None:
            return
        group.missing -= 1
        self.rollouts -= 1
        if isinstance(outcome, Rollout):
            group.rollouts.append(outcome)
        else:
            group.failures.append(outcome)


class RolloutWorkers:
    """The actor's workers. Used by one thread.

    ``poll`` returns ``GroupFinished`` and ``Lost``, and never blocks longer than its timeout. It raises ``DomainError``
    if a worker reports that it cannot work at all. ``close`` ends the processes.

    Args:
        silence_s: a worker without a heartbeat for this many seconds counts as frozen and is killed.
        on_sampling: gets a worker's index and its report about the answers under way.
    """

    def __init__(
        self,
        run_dir: Path,
        job_name: str,
        num_workers: int,
        silence_s: float,
        on_sampling: Callable[[int, Sampling], None] = lambda index, sampling: None,
    ):
        self._on_sampling = on_sampling
        self._context = multiprocessing.get_context("spawn")
        self._run_dir, self._job_name, self._silence_s = run_dir, job_name, silence_s
        self._polled = self._resumed = time.monotonic()
        self._servers = Servers(version=0, urls={}, serving={})
        self._selector = selectors.DefaultSelector()
        self._workers = [self._spawn(index) for index in range(num_workers)]

    @property
    def num_rollouts(self) -> int:
        return sum(worker.rollouts for worker in self._workers)

    def set_servers(self, servers: Servers) -> None:
        """Tells every worker, and every later replacement, which servers are in service."""
        self._servers = servers
        for worker in self._workers:
            self._send(worker, servers)

    def start(self, start: StartGroup) -> None:
        """Gives the work to the least loaded worker."""
        payload = encode_start(start)
        worker = min(self._workers, key=lambda worker: worker.rollouts)
        worker.add(start.task_id, len(start.attempts))
        self._send_bytes(worker, payload)

    def cancel(self, task_id: int) -> None:
        for worker in self._workers:
            if worker.remove(task_id):
                self._send(worker, Cancel(task_id=task_id))

    def poll(self, timeout_s: float) -> list[GroupFinished | Lost]:
        """Returns the groups that finished and the work of workers that died. Waits up to ``timeout_s``."""
        results: list[GroupFinished | Lost] = []
        dead = {worker for worker in self._workers if not worker.process.is_alive()}
        for key, events in self._selector.select(0 if dead else timeout_s):
            worker = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(worker)
            if events & selectors.EVENT_READ:
                results += self._drain(worker)
                dead.discard(worker)
        results += [self._replace(worker) for worker in dead]  # its children keep the connection open
        self._kill_silent()
        return results

    def _kill_silent(self) -> None:
        """Kills workers whose heartbeat has stopped. The next poll notices their end."""
        now = time.monotonic()
        if now - self._polled > PAUSE_S:
            self._resumed = now
        self._polled = now
        for worker in self._workers:
            silent_s = now - max(worker.heartbeat.value, self._resumed)
            if silent_s > self._silence_s:
                log.error(
                    "event=worker_killed index=%d silent_s=%.0f heartbeat_timeout_s=%g",
                    *(worker.index, silent_s, self._silence_s),
                )
                worker.heartbeat.value = now
                worker.process.kill()

    def close(self) -> None:
        for worker in self._workers:
            self._send(worker, Stop())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            self._end(worker)
        self._selector.close()

    def _spawn(self, index: int) -> _Worker:
        ours, theirs = socket.socketpair()
        heartbeat = self._context.RawValue("d", time.monotonic())
        process = self._context.Process(
            target=worker_main,
            args=(str(self._run_dir), self._job_name, index, theirs, heartbeat),
            name=f"{self._job_name}-worker-{index}",
            daemon=True,
        )
        process.start()
        theirs.close()
        worker = _Worker(process=process, connection=ActorConnection(ours), index=index, heartbeat=heartbeat)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._send(worker, self._servers)
        return worker

    def _drain(self, worker: _Worker) -> list[GroupFinished | Lost]:
        try:
            payloads = worker.connection.receive()
        except (EOFError, OSError):
            return [self._replace(worker)]
        results = [self._handle_message(worker, FROM_WORKER.decode(payload)) for payload in payloads]
        return [result for result in results if result is not None]

    def _handle_message(self, worker: _Worker, message: FromWorker) -> GroupFinished | None:
        """Counts the message and returns the group that it completes, if any. Ignores messages of a cancelled group."""
        match message:
            case Ready():
                worker.ready = True
            case Sampling():
                self._on_sampling(worker.index, message)
            case WorkerFailed():
                raise DomainError(message.error)
            case RolloutDone():
                worker.count(message.task_id, message.rollout)
            case RolloutFailed():
                worker.count(message.task_id, message.failure)
            case GroupEnded() if (group := worker.groups.get(message.task_id)) is not None:
                worker.remove(message.task_id)
                return GroupFinished.of(message, group.rollouts, group.failures)
        return None

    def _replace(self, worker: _Worker) -> Lost:
        self._workers.remove(worker)
        worker.process.join(STOP_TIMEOUT_S)
        self._end(worker)
        lost = Lost(task_ids=tuple(worker.groups), exit_code=worker.process.exitcode)
        log.error("event=worker_died index=%d exit_code=%s groups=%d", worker.index, lost.exit_code, len(lost.task_ids))
        if not worker.ready:
            raise DomainError(
                f"a rollout worker ended with exit code {lost.exit_code} while it loaded the domain: see the log above"
            )
        self._workers.append(self._spawn(worker.index))
        return lost

    def _end(self, worker: _Worker) -> None:
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        self._selector.unregister(worker.connection)
        worker.connection.close()

    def _send(self, worker: _Worker, message: ToWorker) -> None:
        self._send_bytes(worker, TO_WORKER.encode(message))

    def _send_bytes(self, worker: _Worker, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed in poll
            worker.connection.send(payload)
        self._listen(worker)

    def _flush(self, worker: _Worker) -> None:
        with contextlib.suppress(OSError):
            worker.connection.flush()
        self._listen(worker)

    def _listen(self, worker: _Worker) -> None:
        """Watches the socket for writability only while there is something to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.connection.has_outgoing else 0)
        if self._selector.get_key(worker.connection).events != events:
            self._selector.modify(worker.connection, events, worker)
