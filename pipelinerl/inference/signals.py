"""Ends a server that is told to, at whatever moment: before the engine's start, during it, or once it serves.

A signal is never lost. The role's handlers set ``stop`` before and after the engine's start; during it a thread waits.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import psutil

from pipelinerl.observability.status import RoleStatus

log = logging.getLogger(__name__)

START_IS_OVER = 0
"""No signal has this number."""


@contextlib.contextmanager
def signals_end_the_start(status: RoleStatus, stop: threading.Event) -> Iterator[None]:
    """Lets a thread handle signals while the engine starts in one long call, which blocks Python signal handlers.

    Ends the process at once if ``stop`` is set: a signal came before, e.g. during the imports.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno())
    thread = threading.Thread(target=_await_signal, args=(reader, status), name="start-signals", daemon=True)
    thread.start()
    try:
        if stop.is_set():
            _end_start(status)
        yield
    finally:
        signal.set_wakeup_fd(previous)
        writer.send(bytes([START_IS_OVER]))  # a forked engine keeps its copy open: closing ours would end nothing
        thread.join()
        writer.close()
        reader.close()


def _await_signal(reader: socket.socket, status: RoleStatus) -> None:
    """Ends with the process at the first SIGTERM or SIGINT, or when the start is over."""
    while (number := reader.recv(1)) and number[0] != START_IS_OVER:
        if number[0] in (signal.SIGTERM, signal.SIGINT):
            _end_start(status)


def _end_start(status: RoleStatus) -> NoReturn:
    log.info("event=start_ended_by_signal")
    _kill_engine()
    status.close("done")
    os._exit(0)


def _kill_engine() -> None:
    """All children but Python's resource tracker, which then unlinks what they held."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in argument for argument in child.cmdline()):
                child.kill()


async def end_when_asked(app: Any, asked: asyncio.Event, stop: threading.Event) -> None:
    """Take the signals from `serve_http`, which cannot say whether a signal or the engine's death ended it."""
    # This runs at the first wait of `serve_http`, when it has installed its handlers.
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    if stop.is_set():  # since the engine's start, while the application was built
        asked.set()
    await asked.wait()
    app.state.server.should_exit = True
