"""How long a role waits for an answer of redis."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipelinerl.errors import StreamError
from pipelinerl.streams import redis_connection
from pipelinerl.streams.redis_connection import SYNC_REQUESTS, RedisConnection

ANSWERS_AFTER_S = 1


def ask(options: dict[str, Any] | None, outage_timeout_s: float) -> float:
    """Asks for what the server answers after a second. Returns how long the next command would wait."""
    if options is None:
        pytest.skip("needs redis-server")
    with RedisConnection({"host": "127.0.0.1"} | options, outage_timeout_s, asks_for_sync=False) as server:
        assert server.call(lambda client: client.brpop(["nobody writes this"], timeout=ANSWERS_AFTER_S)) is None
        return server.client.connection_pool.connection_kwargs["socket_timeout"]


def test_answer_that_takes_longer_than_one_attempt_waits_arrives(
    redis_options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of 400 MB took longer than every attempt, which were all of one length, until the role gave up."""
    monkeypatch.setattr(redis_connection, "_SOCKET_TIMEOUT_S", 0.2)
    assert ask(redis_options, 60.0) == 0.2


def test_server_that_never_answers_is_given_up(
    redis_options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_connection, "_SOCKET_TIMEOUT_S", 0.05)
    with pytest.raises(StreamError, match=r"did not answer for 0\.3 s"):
        ask(redis_options, 0.3)


def test_sync_whose_request_a_killed_role_has_taken_is_asked_for_again(
    redis_options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if redis_options is None:
        pytest.skip("needs redis-server")
    monkeypatch.setattr(redis_connection, "ASK_AGAIN_S", 0.1)
    address = {"host": "127.0.0.1"} | redis_options
    with (
        RedisConnection(address, 60.0, asks_for_sync=True) as server,
        RedisConnection(address, 60.0, asks_for_sync=False) as role,
        ThreadPoolExecutor(1) as pool,
    ):
        synced = pool.submit(server.sync)
        taken = [role.client.brpop([SYNC_REQUESTS], timeout=30) for _ in range(2)]
        assert taken[0] == taken[1] is not None, "the second request has the first one's reply"
        assert not synced.done()
        role.client.lpush(taken[1][1], 1)
        synced.result(30)
