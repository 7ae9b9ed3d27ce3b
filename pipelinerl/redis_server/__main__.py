"""The redis server of a run as a role: ``python -m pipelinerl.redis_server --run-dir R --job redis_0``.

Starts redis-server, watches that it answers, and stops it. The role fails when the server ends. The server's answers
are the role's heartbeat, so a frozen server is a frozen role. The supervisor restarts both.
"""

import os
import subprocess
from typing import TYPE_CHECKING

from pipelinerl.config.environment import REDIS_PASSWORD_VARIABLE
from pipelinerl.errors import StreamError
from pipelinerl.observability.role import RoleContext, run_role
from pipelinerl.redis_server.server import exclusively, redis_client, redis_config, start_redis, stop_redis

if TYPE_CHECKING:
    import redis

_PING_EVERY_S = 1.0


def run_redis(context: RoleContext) -> None:
    """Keeps the server running until the role is told to stop; raises ``StreamError`` when the server fails."""
    cfg, job = context.cfg, context.job
    assert job.port is not None, "the world gives redis a port"
    data_dir = context.run_dir / job.name / "data"
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    password = os.environ.get(REDIS_PASSWORD_VARIABLE)
    config = redis_config(
        port=job.port,
        data_dir=data_dir.resolve(),
        password=password,
        several_nodes=len(context.world.nodes) > 1,
        fsync=cfg.streams.fsync,
        max_record_mb=cfg.streams.max_record_mb,
    )
    with exclusively(data_dir):
        process = start_redis(config)
        try:
            _watch(context, process, redis_client(job.port, password))
        finally:
            stop_redis(process)


def _watch(context: RoleContext, process: "subprocess.Popen[bytes]", client: "redis.Redis") -> None:
    """Waits for the request to stop; fails when the server ends. Every answer is a heartbeat."""
    from redis.exceptions import RedisError, ResponseError

    while not context.stop.wait(_PING_EVERY_S):
        if process.poll() is not None:
            raise StreamError(
                f"redis-server ended with code {process.returncode}; its last words are above in this log"
            )
        try:
            client.ping()
            answered = True
        except ResponseError as error:
            raise StreamError(f"redis-server on port {context.job.port} refuses to answer: {error}") from error
        except RedisError as error:
            answered = "loading" in str(error).lower()
        if answered:
            context.status.progress()
            context.status.beat_with_progress()
    client.close()


if __name__ == "__main__":
    run_role(run_redis)
