"""One event per line on stderr, which the launcher redirects to `<job>/log.txt`.

    2026-01-31 12:00:00.123 INFO actor_0 actor.loop: published group=0-17 rollouts=8

Secrets are replaced, and control characters made visible, before a line is written, also in prints of libraries and
domains. Tracebacks are indented, so every line that starts in column 0 is an event.
"""

import contextlib
import json
import logging
import logging.handlers
import os
import sys
import time
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelinerl.config.environment import HIDDEN, NEVER_LOGGED, REFERRED
from pipelinerl.errors import visible

CHATTY = ("httpx", "httpcore", "urllib3", "aiohttp.access", "asyncio", "filelock", "matplotlib", "fsspec")
MIN_SECRET_CHARS = 6
"""Shorter values are not replaced in logs: they would be found in ordinary words."""


def redacted(text: str) -> str:
    """Returns the text without the values of ``NEVER_LOGGED`` and ``REFERRED`` in this process's environment."""
    values = frozenset(value for name in (*NEVER_LOGGED, *REFERRED) if (value := os.environ.get(name)))
    for form in _forms(values):
        text = text.replace(form, HIDDEN)
    return text


@lru_cache(maxsize=4)
def _forms(values: frozenset[str]) -> tuple[str, ...]:
    """Forms of secrets in texts, the longest first: whole, word for word (`Bearer …`), and quoted."""
    words = {word for value in values for word in (value, *value.split()) if len(word) >= MIN_SECRET_CHARS}
    quoted = {form for word in words for form in (word, repr(word)[1:-1], json.dumps(word)[1:-1])}
    return tuple(sorted(quoted, key=len, reverse=True))


def shown(text: str) -> str:
    """Returns a text for a log or a terminal: without secrets, with visible control characters."""
    return visible(redacted(text))


class EventFormatter(logging.Formatter):
    """Formats an event as one line `time LEVEL job logger: message`, with secrets replaced."""

    def __init__(self, job_name: str):
        super().__init__()
        self.job_name = job_name

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        logger = record.name.removeprefix("pipelinerl.")
        event = f"{record.levelname} {self.job_name} {logger}: {record.getMessage()}"
        line = f"{stamp}.{int(record.msecs):03d} " + shown(event).replace("\n", "\\n")
        if record.exc_info:
            line += "\n" + _indent(shown(self.formatException(record.exc_info)))
        if record.stack_info:
            line += "\n" + _indent(shown(self.formatStack(record.stack_info)))
        return line


class ShownStream:
    """Standard output or error, on which texts are ``shown``. A progress bar's carriage return ends a line."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(shown(text.replace("\r", "\n")))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def setup_role_logging(job_name: str) -> None:
    """Send every logger of this process to stderr in the run's format, and its prints through ``shown``."""
    show_prints()
    _install(logging.StreamHandler(sys.stderr), job_name)


def show_prints() -> None:
    """Make this process's standard output and error ``ShownStream``s."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, ShownStream):
            setattr(sys, name, ShownStream(stream))


def setup_launcher_logging(path: Path, max_mb: int) -> None:
    """Send every logger of the launcher to a file, because the terminal shows progress and messages.

    Args:
        max_mb: the file's bound in MiB. A full one becomes `launcher.log.1`.
    """
    _install(LauncherLog(path, max_bytes=max_mb * 2**20), "launcher")


class LauncherLog(logging.handlers.RotatingFileHandler):
    """A bounded log file. If its disk fails, the run goes on and one line is on stderr."""

    _said = False

    def __init__(self, path: Path, max_bytes: int = 0):
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(error := sys.exception(), OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            print(f"{self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def _install(handler: logging.Handler, name: str) -> None:
    handler.setFormatter(EventFormatter(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """Restores loggers and warnings on exit, and closes handlers that this module installed."""
    root, shows_warning = logging.getLogger(), warnings.showwarning
    handlers = root.handlers[:]
    levels = {logger: logger.level for logger in (root, *map(logging.getLogger, CHATTY))}
    try:
        yield
    finally:
        installed = [handler for handler in root.handlers if handler not in handlers]
        root.handlers[:] = handlers
        for handler in installed:
            handler.close()
        for logger, level in levels.items():
            logger.setLevel(level)
        if warnings.showwarning is not shows_warning:
            logging.captureWarnings(False)
