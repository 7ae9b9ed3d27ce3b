"""A redis server for the contract tests, where redis-server is installed."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from pipelinerl.errors import ConfigError
from pipelinerl.streams.redis_server import redis_command, redis_config, start_redis, stop_redis
from tests.ports import free_port


@pytest.fixture(scope="session")
def redis_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any] | None]:
    """Options of ``set_streams_backend("redis", …)`` for a server of the test session; None where there is none."""
    try:
        redis_command()
    except ConfigError:
        yield None
        return
    port = free_port()
    config = redis_config(
        port=port,
        data_dir=tmp_path_factory.mktemp("redis"),
        password="of the tests",
        address=None,
        fsync="never",
        max_record_mb=512,
    )
    process = start_redis(config)
    try:
        with redis.Redis(port=port, password="of the tests") as client:
            client.ping()  # with redis-py's own retries until it is up
        yield {"port": port, "password": "of the tests"}
    finally:
        stop_redis(process)
