"""Opens a run from outside, while it is alive or after it has ended: for the commands that read one, and for tests.

The redis of an ended run is started again on its data for the time of the look, on a free loopback port with a new
password.
"""

import argparse
import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl.config.environment import CA_VARIABLE, REDIS_PASSWORD_VARIABLE, ROLE_VARIABLE
from pipelinerl.config.load import RUN_CONFIG, load_old_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import StreamError
from pipelinerl.observability.status import read_statuses
from pipelinerl.streams import backend_from_config, set_streams_backend
from pipelinerl.streams.redis_server import await_redis, exclusively, redis_config, start_redis, stop_redis
from pipelinerl.world.network import LARGEST_PORT


def natural(text: str) -> int:
    """An argument that is a number of things, or the number of one."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def port_number(text: str) -> int:
    if (value := natural(text)) > LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"{value} is above {LARGEST_PORT}")
    return value


def command_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `pipelinerl <command>`, without arguments.

    Args:
        doc: the module's docstring. Its first line is the description, and the rest stands below the arguments.
    """
    first, _, rest = (doc or "").partition("\n")  # `python -OO` has none
    return argparse.ArgumentParser(
        prog=f"pipelinerl {command}",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


@contextlib.contextmanager
def look_into(run_dir: Path) -> Iterator[None]:
    """Set the streams backend of the run's configuration, or `files` if the folder has no configuration.

    Raises:
        StreamError: there is no such folder, or the password of its redis is not available here.
    """
    if not run_dir.is_dir():
        raise StreamError(f"{run_dir} is not a run folder: there is no such folder")
    if not (run_dir / RUN_CONFIG).exists():
        set_streams_backend("files")
        yield
        return
    cfg = load_old_run(run_dir)
    data_dir = run_dir / "redis_0" / "data"
    if cfg.streams.backend != "redis" or cfg.streams.external or REDIS_PASSWORD_VARIABLE in os.environ:
        backend_from_config(cfg, run_dir)
        yield
    elif password := (environment := environment_of_live_roles(run_dir)).get(REDIS_PASSWORD_VARIABLE):
        os.environ.setdefault(CA_VARIABLE, environment.get(CA_VARIABLE, ""))
        _set_redis(cfg, run_dir, password=password)
        yield
    elif data_dir.is_dir():
        with revived_redis(cfg, run_dir, data_dir):
            yield
    else:
        raise StreamError(f"{run_dir} keeps its streams on redis: set {REDIS_PASSWORD_VARIABLE} to its password")


def environment_of_live_roles(run_dir: Path) -> dict[str, str]:
    """Read the environment of a live role of this user on this node. Empty if there is no such role."""
    # The password of a live run's redis is in no file.
    for status in read_statuses(run_dir).values():
        environment = process_environment(status.pid)
        if environment.get(ROLE_VARIABLE, "").endswith(f"/{status.job}"):
            return environment
    return {}


def process_environment(pid: int) -> dict[str, str]:
    """Read another process's environment. Empty if the process has ended or belongs to another user."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@contextlib.contextmanager
def revived_redis(cfg: Config, run_dir: Path, data_dir: Path) -> Iterator[None]:
    """Run redis on the data of an ended run while the block runs, and use it as this process's backend."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    password = secrets.token_urlsafe(32)
    config = redis_config(
        port=port,
        data_dir=data_dir.resolve(),
        password=password,
        address=None,
        fsync="never",
        max_record_mb=cfg.streams.max_record_mb,
    )
    with exclusively(data_dir), tempfile.TemporaryFile() as log:
        process = start_redis(config, log.fileno())
        try:
            await_redis(process, port, password)
            _set_redis(cfg, run_dir, host="127.0.0.1", port=port, password=password, tls=False)
            yield
        finally:
            stop_redis(process)


def _set_redis(cfg: Config, run_dir: Path, **address: Any) -> None:
    from pipelinerl.streams.redis import RedisBackend  # the client is an optional dependency

    set_streams_backend(RedisBackend.from_config(cfg, run_dir, **address))
