"""A connection to a redis server. It retries during an outage and can ask the run's own server to sync its log."""

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import redis as redis_client
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.retry import Retry

from pipelinerl.errors import StreamError

log = logging.getLogger(__name__)

SYNC_REQUESTS = "pipelinerl:sync"
"""List of pending sync requests (their reply keys). The redis role pops them, syncs the log, and replies."""
SYNC_REPLIES = "pipelinerl:synced:"
BLOCK_S = 1.0
"""Longest wait in one blocking command, well below the time for an answer."""
ASK_AGAIN_S = 5.0
"""A sync that is not answered within this is asked for again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Pauses between two attempts during an outage, each twice the one before."""
_SOCKET_TIMEOUT_S = 10.0
"""Time for an answer at first. It doubles while answers do not come in time, because a large record takes longer."""
AWAY = (redis_client.ConnectionError, redis_client.TimeoutError)


class RedisConnection:
    """One connection to the server. Repeats a command until the server answers or ``outage_timeout_s`` has passed."""

    def __init__(self, address: dict[str, Any], outage_timeout_s: float, asks_for_sync: bool):
        self._asks_for_sync = asks_for_sync
        self._name = f"redis at {address['host']}:{address['port']}"
        self._outage_timeout_s = outage_timeout_s
        self._scripts: dict[str, Any] = {}
        self.client = redis_client.Redis(
            **address,
            socket_timeout=_SOCKET_TIMEOUT_S,
            socket_connect_timeout=_SOCKET_TIMEOUT_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )

    def call(self, command: Callable[[redis_client.Redis], Any]) -> Any:
        """Returns the result of ``command``, which must be idempotent because it may be sent more than once."""
        since = time.monotonic()
        pause = FIRST_PAUSE_S
        answer_s = _SOCKET_TIMEOUT_S
        while True:
            try:
                result = command(self.client)
            except AWAY as error:
                self.check(error, since)
                if isinstance(error, redis_client.TimeoutError):  # a large record may take longer
                    left_s = self._outage_timeout_s - (time.monotonic() - since)
                    answer_s = max(min(2 * answer_s, left_s), _SOCKET_TIMEOUT_S)
                    self._wait_for_answers(answer_s)
                log.warning("event=redis_away server=%s error=%s next_attempt_s=%.2f", self._name, error, pause)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            except ResponseError:
                raise
            except RedisError as error:
                raise StreamError(f"{self._name}: {error}") from error
            else:
                if answer_s > _SOCKET_TIMEOUT_S:
                    self._wait_for_answers(_SOCKET_TIMEOUT_S)
                return result

    def _wait_for_answers(self, seconds: float) -> None:
        """Sets how long an attempt waits for the server's answer. Takes a new connection."""
        pool = self.client.connection_pool
        pool.disconnect()
        pool.connection_kwargs["socket_timeout"] = seconds
        pool.reset()

    def script(self, source: str, keys: list[str], args: list[Any]) -> Any:
        """Runs a Lua script, which the server executes atomically."""
        if source not in self._scripts:
            self._scripts[source] = self.client.register_script(source)
        return self.call(lambda client: self._scripts[source](keys=keys, args=args))

    def sync(self) -> None:
        """Waits until the redis role has synced every acknowledged write. Any thread may call it."""
        if not self._asks_for_sync:
            return
        reply, since, asked = f"{SYNC_REPLIES}{secrets.token_hex(16)}", time.monotonic(), -math.inf
        while True:
            if time.monotonic() - asked > ASK_AGAIN_S:  # a role that is killed may take request or answer with it
                self.call(lambda client: client.lpush(SYNC_REQUESTS, reply))
                asked = time.monotonic()
            if self.call(lambda client: client.brpop([reply], timeout=BLOCK_S)) is not None:
                return
            if time.monotonic() - since > self._outage_timeout_s:
                raise StreamError(f"{self._name}: its role did not sync the data for {self._outage_timeout_s:g} s")

    def check(self, error: Exception, since: float) -> None:
        """Raises ``StreamError`` if another attempt is useless. ``since`` is the monotonic start of the outage."""
        if isinstance(error, AuthenticationError):
            raise StreamError(f"{self._name} refuses the password in PIPELINERL_REDIS_PASSWORD: {error}") from error
        if time.monotonic() - since > self._outage_timeout_s:
            raise StreamError(f"{self._name} did not answer for {self._outage_timeout_s:g} s: {error}") from error

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> "RedisConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
