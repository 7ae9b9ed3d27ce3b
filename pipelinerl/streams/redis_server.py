"""Starts and stops a redis-server process, where streams=redis.

It listens on loopback, and with several nodes on the node's own address too. Then it must have a password, which is in
no file and on no command line: the server reads its configuration from standard input.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from pipelinerl.config.environment import REDIS_PASSWORD_VARIABLE
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.world.process import kept
from pipelinerl.world.tls import redis_options

if TYPE_CHECKING:
    import redis


OLDEST_VERSION = 7
"""Oldest supported major version. XTRIM with MINID needs 6.2."""
PING_TIMEOUT_S = 5.0
"""Time for an answer of the own server. A longer one means that it is frozen."""
_STOP_S = 6.0
"""Time for the server to stop by itself. Killing it loses nothing that was acknowledged."""


def redis_config(
    *,
    port: int,
    data_dir: Path,
    password: str | None,
    address: str | None,
    fsync: Literal["never", "segment", "always"],
    max_record_mb: int,
    tls: tuple[str, str] | None = None,
) -> str:
    """The text of the server's configuration file.

    Args:
        address: the node's own address, where other nodes reach it. "" = every address, None = loopback only.
        data_dir: where the append-only file is.
        fsync: ``always`` syncs before a write is acknowledged. Otherwise writing back is left to the kernel, which
            loses nothing when the server is killed.
        tls: files with certificate and private key. The server then speaks nothing but TLS.
    """
    if address is not None and not password:
        raise ConfigError(f"redis must listen beyond its node, but {REDIS_PASSWORD_VARIABLE} is not set: set it")
    bound = {None: "127.0.0.1", "": "* -::*"}.get(address, f"127.0.0.1 {address}")
    lines = [
        f"bind {bound}",
        "protected-mode yes",
        f"port {0 if tls else port}",
        f"dir {_quoted(str(data_dir))}",
        "appendonly yes",
        # redis' `everysec` may acknowledge what it has not yet written.
        f"appendfsync {'always' if fsync == 'always' else 'no'}",
        'save ""',
        "maxmemory-policy noeviction",
        f"proto-max-bulk-len {max(max_record_mb + 1, 512)}mb",
        "daemonize no",
        "databases 1",
    ]
    if tls:
        lines += [f"tls-port {port}", f"tls-cert-file {_quoted(tls[0])}", f"tls-key-file {_quoted(tls[1])}"]
        lines += [f"tls-ca-cert-file {_quoted(tls[0])}", "tls-auth-clients no"]
    if password:
        lines.append(f"requirepass {_quoted(password)}")
    return "\n".join(lines) + "\n"


def redis_command() -> list[str]:
    """How to start the server so that it reads its configuration from standard input; checks that it is installed."""
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigError(
            "streams=redis needs the program redis-server: install it (apt install redis-server), or set "
            "streams.external=true with streams.host and streams.port, or use streams=files"
        )
    version = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True, timeout=30, encoding="utf-8"
    ).stdout
    major = int(version.partition("v=")[2].partition(".")[0] or 0)
    if major < OLDEST_VERSION:
        raise ConfigError(f"{program} is version {major}: streams=redis needs {OLDEST_VERSION} or newer")
    return [program, "-"]


def start_redis(config: str, log_file: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
    """Starts redis-server with this configuration. The caller stops it with ``stop_redis``."""
    process = subprocess.Popen(kept(redis_command()), stdin=subprocess.PIPE, stdout=log_file, stderr=log_file)
    assert process.stdin is not None
    process.stdin.write(config.encode())
    process.stdin.close()
    return process


def stop_redis(process: "subprocess.Popen[bytes]") -> None:
    """Stops the server, and kills it if it does not stop (if frozen, for instance). No acknowledged write is lost."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def exclusively(data_dir: Path) -> Iterator[None]:
    """Allows only one server at a time on ``data_dir``."""
    descriptor = os.open(data_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StreamError(f"{data_dir} is in use by another redis-server of this run") from None
    finally:
        os.close(descriptor)


def await_redis(process: "subprocess.Popen[bytes]", port: int, password: str, *, tls: bool = False) -> None:
    """Returns when the server has loaded its data."""
    from redis.exceptions import RedisError

    deadline = time.monotonic() + 60.0  # it may load gigabytes
    with redis_client(port, password, tls=tls) as client:
        while True:
            try:
                client.ping()
                return
            except RedisError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise StreamError(f"redis-server on port {port} did not start: {error}") from error
                time.sleep(0.02)


def redis_client(port: int, password: str | None, *, tls: bool = False) -> "redis.Redis":
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return redis.Redis(
        port=port,
        password=password,
        socket_timeout=PING_TIMEOUT_S,
        socket_connect_timeout=PING_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        **(redis_options() if tls else {}),
    )


def _quoted(text: str) -> str:
    """A string as a redis configuration file writes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if any(ord(letter) < 32 for letter in text):
        raise ConfigError("a redis password or path must not contain control characters")
    return f'"{escaped}"'
