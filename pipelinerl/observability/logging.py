"""One event per line on stderr, which the launcher redirects to `<job>/log.txt`.

    2026-01-31 12:00:00.123 INFO actor_0 actor.loop: published group=0-17 rollouts=8

Secrets of the run are replaced before a line is written, wherever they come from. Tracebacks are indented, so every
line that starts in column 0 is an event.
"""

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.config.environment import SECRET_VARIABLES

NEVER_LOGGED = (*SECRET_VARIABLES, "WANDB_API_KEY", "HF_TOKEN")
CHATTY = ("httpx", "httpcore", "urllib3", "aiohttp.access", "asyncio", "filelock", "matplotlib", "fsspec")


class EventFormatter(logging.Formatter):
    """Formats an event as one line `time LEVEL job logger: message`, with secrets replaced."""

    def __init__(self, job_name: str, secrets: tuple[str, ...] = ()):
        super().__init__()
        self.job_name = job_name
        self.secrets = tuple(secret for secret in secrets if len(secret) >= 8)

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        logger = record.name.removeprefix("pipelinerl.")
        message = record.getMessage().replace("\n", "\\n")
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname} {self.job_name} {logger}: {message}"
        if record.exc_info:
            line += "\n" + _indent(self.formatException(record.exc_info))
        if record.stack_info:
            line += "\n" + _indent(self.formatStack(record.stack_info))
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return line


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def setup_role_logging(job_name: str, level: int = logging.INFO) -> None:
    """Send every logger of this process to stderr in the run's format."""
    _install(logging.StreamHandler(sys.stderr), job_name, level)


def setup_launcher_logging(path: Path) -> None:
    """Send every logger of the launcher to a file, because the terminal shows progress and messages."""
    _install(logging.FileHandler(path), "launcher", logging.INFO)


def _install(handler: logging.Handler, name: str, level: int) -> None:
    secrets = tuple(os.environ[variable] for variable in NEVER_LOGGED if os.environ.get(variable))
    handler.setFormatter(EventFormatter(name, secrets))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


@contextlib.contextmanager
def logging_restored() -> Iterator[None]:
    """Undoes on exit what the functions of this module did inside, and closes the handlers that they installed."""
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
