"""A worker process runs rollouts in its own asyncio loop and talks to the actor over a ``connection``."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipelinerl.actor.connection import WorkerConnection
from pipelinerl.actor.growth import FOLLOW_S
from pipelinerl.actor.loop_watchdog import LoopWatchdog
from pipelinerl.actor.messages import (
    FROM_WORKER,
    TO_WORKER,
    Cancel,
    FromWorker,
    Ready,
    Sampling,
    Servers,
    StartGroup,
    Stop,
    WorkerFailed,
    unpack_pictures,
)
from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.world.tls import client_context

if TYPE_CHECKING:
    from pipelinerl.actor.executor import Executor
    from pipelinerl.actor.router import Client

log = logging.getLogger(__name__)

BEAT_S = 2.0
"""Interval of heartbeats: 30 within the default of `launcher.heartbeat_timeout_s`."""


def worker_main(run_dir: str, job_name: str, index: int, sock: socket.socket, heartbeat: Any) -> None:
    """Entry point of the process. Ends on ``Stop``, when the connection closes, or after sending ``WorkerFailed``.

    Args:
        sock: this worker's end of the connection.
        heartbeat: shared double that receives the monotonic time.
    """
    from pipelinerl.observability import spans
    from pipelinerl.observability.logging import setup_role_logging
    from pipelinerl.world.process import die_with_parent, raise_open_files

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    raise_open_files()
    name = f"{job_name}.worker{index}"
    setup_role_logging(name)
    threading.Thread(target=_beat, args=(heartbeat,), name="heartbeat", daemon=True).start()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_live(Path(run_dir), job_name, sock, name))
    spans.stop()
    os._exit(code)


def _beat(heartbeat: Any) -> None:
    """Writes the heartbeat until the process ends. Runs in a thread, because a domain may keep the loop busy."""
    while True:
        heartbeat.value = time.monotonic()
        time.sleep(BEAT_S)


async def _live(run_dir: Path, job_name: str, sock: socket.socket, name: str) -> int:
    """Runs the worker, reports an error to the actor, and returns the exit code."""
    connection = await WorkerConnection.open(sock)

    async def send(message: FromWorker) -> None:
        await connection.send(FROM_WORKER.encode(message))

    try:
        await _serve(run_dir, job_name, connection, send, name)
    except Exception as error:  # the process boundary
        log.exception("event=worker_failed")
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        with contextlib.suppress(OSError):
            await send(WorkerFailed(error=f"{type(error).__name__}: {error}"))
            await connection.close()
        return 1
    return 0


async def _serve(
    run_dir: Path,
    job_name: str,
    connection: WorkerConnection,
    send: Callable[[FromWorker], Coroutine[Any, Any, None]],
    name: str,
) -> None:
    """Reads the actor's messages, starts groups and sends their outcomes. ``name``: the process's, in its spans."""
    import aiohttp

    from pipelinerl.actor.answer_journal import AnswerJournal
    from pipelinerl.actor.executor import Executor, GroupTasks
    from pipelinerl.actor.router import Client
    from pipelinerl.actor.setup import load_rollout_side
    from pipelinerl.actor.without_trainer import ONLY_VERSION
    from pipelinerl.domains.contract import domains_of
    from pipelinerl.observability import spans
    from pipelinerl.world.proxies import open_session

    side = load_rollout_side(run_dir)
    spans.start_recording(side.config, run_dir, name)
    gc.collect()
    gc.freeze()  # a full collection of the objects loaded so far blocks the loop for 70 ms and finds nothing
    connector = aiohttp.TCPConnector(limit=side.limits.max_connections, keepalive_timeout=30, ssl=client_context())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as to_servers,
        open_session(connector=connector, connector_owner=False, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        only_version = None if side.config.debug.mode is None else ONLY_VERSION
        client = Client(to_servers, side.limits, os.environ.get(SECRET_VARIABLE, ""), only_version)
        is_kept = side.config.actor.answer_journal and not side.config.finetune.router_replay
        answers = AnswerJournal(run_dir / job_name) if is_kept else None
        executor = Executor(side.cfg, side.functions, side.llms, client, side.rules, answers, session, side.judges)
        groups = GroupTasks(executor, send, tasks)
        await send(Ready())
        names = [domain.section.name for domain in domains_of(side.config)]
        watchdog = LoopWatchdog(
            dict(zip(names, side.functions, strict=True)),
            lambda task: None if (index := executor.domain_of(task)) is None else names[index],
        )
        watchdog.start()
        following = tasks.create_task(_follow(client, executor, watchdog, send))
        async for payload in connection.messages():
            match TO_WORKER.decode(payload):
                case Servers() as servers:
                    executor.servers.update(
                        servers.urls, servers.serving, servers.probes_missed, servers.draining, servers.capacities
                    )
                case StartGroup() as start:
                    groups.start(msgspec.structs.replace(start, problem=unpack_pictures(start.problem)))
                case Cancel() as cancel:
                    groups.cancel(cancel.task_id)
                case Stop():
                    break
        groups.close()
        following.cancel()
        watchdog.stop()


async def _follow(
    client: "Client",
    executor: "Executor",
    watchdog: LoopWatchdog,
    send: Callable[[FromWorker], Coroutine[Any, Any, None]],
) -> None:
    """Follows the answers under way and reports what was sampled, once a second. Ends when it is cancelled."""
    sent, then, busy_s = None, time.monotonic(), 0.0
    while True:
        await asyncio.sleep(FOLLOW_S)
        await client.follow()
        now = time.monotonic()
        busy, then, busy_s = (watchdog.busy_s - busy_s) / (now - then), now, watchdog.busy_s
        sampling = Sampling(
            tokens=client.followed.tokens,
            longest=client.followed.longest,
            ended=executor.ended,
            busy=round(busy, 2),
            blocked=dict(watchdog.blocked),
        )
        if sampling != sent:
            await send(sampling)
            sent = sampling
