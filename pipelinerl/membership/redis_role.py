"""The redis server of a run as a role: ``python -m pipelinerl.membership.redis_role --run-dir R --job redis_0``.

Starts redis-server, syncs its log at the request of a stream's reader or writer, and stops it. The role fails when the
server ends. The server's answers are the role's heartbeat, so a frozen server is a frozen role, which is restarted.
"""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.config.environment import REDIS_PASSWORD_VARIABLE
from pipelinerl.errors import StreamError
from pipelinerl.membership.role import RoleContext, run_role
from pipelinerl.streams.redis_server import exclusively, redis_client, redis_config, start_redis, stop_redis
from pipelinerl.world.disk import sync_path
from pipelinerl.world.network import listen_address
from pipelinerl.world.tls import server_files

if TYPE_CHECKING:
    import redis

_REPLY_KEPT_S = 120
"""A reply to a reader or writer that has ended is deleted after this time."""
_WAIT_S = 0.25
"""Longest wait for a request to sync, and between two looks at a server that does not answer: the role's beat."""


def run_redis(context: RoleContext) -> None:
    """Keeps the server running until the role is stopped. Raises ``StreamError`` when the server fails."""
    cfg, job = context.cfg, context.job
    assert job.port is not None, "the world gives redis a port"
    data_dir = context.run_dir / job.name / "data"
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    password = os.environ.get(REDIS_PASSWORD_VARIABLE)
    config = redis_config(
        port=job.port,
        data_dir=data_dir.resolve(),
        password=password,
        address=listen_address(job.hostname) if context.world.is_open else None,
        fsync=cfg.streams.fsync,
        max_record_mb=cfg.streams.max_record_mb,
        tls=server_files(cfg.world, job.hostname),
    )
    with exclusively(data_dir):
        process = start_redis(config)
        try:
            _watch(context, process, redis_client(job.port, password, tls=cfg.world.tls), data_dir)
        finally:
            stop_redis(process)


def _watch(context: RoleContext, process: "subprocess.Popen[bytes]", client: "redis.Redis", data_dir: Path) -> None:
    """Syncs on request. Raises ``StreamError`` when the server ends or refuses."""
    from redis.exceptions import RedisError, ResponseError

    while not context.stop.is_set():
        if process.poll() is not None:
            raise StreamError(
                f"redis-server ended with code {process.returncode}; its last words are above in this log"
            )
        try:
            answer_syncs(client, data_dir)
            answered = True
        except ResponseError as error:
            raise StreamError(f"redis-server on port {context.job.port} refuses to answer: {error}") from error
        except RedisError as error:
            answered = "loading" in str(error).lower()
            context.stop.wait(_WAIT_S)
        if answered:
            context.status.progress()
            context.status.beat_with_progress()
    client.close()


def answer_syncs(client: "redis.Redis", data_dir: Path) -> None:
    """Takes the requests that come within ``_WAIT_S``, and answers them when all acknowledged writes are synced."""
    from pipelinerl.streams.redis_connection import SYNC_REQUESTS

    request = client.brpop([SYNC_REQUESTS], timeout=_WAIT_S)
    if request is None:
        return
    replies = [request[1], *(client.rpop(SYNC_REQUESTS, 1000) or ())]
    for folder, _, names in os.walk(data_dir):
        for path in (*(Path(folder, name) for name in names), Path(folder)):
            with contextlib.suppress(FileNotFoundError):  # a log that was rewritten meanwhile
                sync_path(path)
    for reply in replies:
        client.lpush(reply, 1)
        client.expire(reply, _REPLY_KEPT_S)


if __name__ == "__main__":
    run_role(run_redis)
