"""The store of leases on the run's redis server, for runs that keep their streams there too.

    pipelinerl-run:<run>:members     hash: name → lease
    pipelinerl-run:<run>:leave       set: names that are asked to leave
    pipelinerl-run:<run>:documents   hash: configuration and world, for roles that start without the run folder

A write that depends on the stored value is one Lua script, which the server executes atomically.
"""

import contextlib
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import redis as redis_client
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry

from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import StoreAwayError, StoreRefusedError, decode_lease

TIMEOUT_S = 5.0

# KEYS: members; ARGV: name, incarnation, lease. Replaces the lease unless another incarnation has the name.
_RENEW = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and cjson.decode(held)['incarnation'] ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

# KEYS: members, leave; ARGV: name, incarnation.
_REMOVE = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and cjson.decode(held)['incarnation'] == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('SREM', KEYS[2], ARGV[1])
end
return 1
"""


class RedisStore:
    """Leases of one run on one redis server.

    Args:
        server: host, port, password and TLS options of the server, as the redis client takes them.
        run_id: the run's name in the keys.
    """

    def __init__(self, server: Mapping[str, Any], run_id: str):
        self._name = f"redis at {server['host']}:{server['port']}"
        self._prefix = f"pipelinerl-run:{run_id}"
        self._client: Any = redis_client.Redis(
            **server,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    def claim(self, lease: Lease) -> bool:
        with self._server():
            return bool(self._client.hsetnx(self._members, lease.name, msgspec.json.encode(lease)))

    def overwrite(self, lease: Lease) -> None:
        with self._server():
            self._client.srem(self._leave, lease.name)
            self._client.hset(self._members, lease.name, msgspec.json.encode(lease))

    def renew(self, lease: Lease) -> bool:
        with self._server():
            arguments = [lease.name, lease.incarnation, msgspec.json.encode(lease)]
            return bool(self._client.eval(_RENEW, 1, self._members, *arguments))

    def remove(self, lease: Lease) -> None:
        with self._server():
            self._client.eval(_REMOVE, 2, self._members, self._leave, lease.name, lease.incarnation)

    def leases(self) -> dict[str, Lease]:
        with self._server():
            found = self._client.hgetall(self._members)
        decoded = {name.decode(): decode_lease(name.decode(), content) for name, content in found.items()}
        return {name: lease for name, lease in decoded.items() if lease is not None}

    def ask_to_leave(self, name: str) -> None:
        with self._server():
            self._client.sadd(self._leave, name)

    def is_asked_to_leave(self, name: str) -> bool:
        with self._server():
            return bool(self._client.sismember(self._leave, name))

    def publish_documents(self, documents: Mapping[str, bytes]) -> None:
        """Replace the documents for roles that start without the run folder."""
        with self._server():
            self._client.hset(f"{self._prefix}:documents", mapping=dict(documents))

    def documents(self) -> dict[str, bytes]:
        """Return the published documents by name. Empty before the launcher has published them."""
        with self._server():
            found = self._client.hgetall(f"{self._prefix}:documents")
        return {name.decode(): content for name, content in found.items()}

    @property
    def _members(self) -> str:
        return f"{self._prefix}:members"

    @property
    def _leave(self) -> str:
        return f"{self._prefix}:leave"

    @contextlib.contextmanager
    def _server(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise StoreRefusedError(f"{self._name} refuses the password: {error}") from error
        except RedisError as error:
            if isinstance(error.__context__, ssl.SSLCertVerificationError):  # the authority follows from the secret
                raise StoreRefusedError(f"{self._name} has another certificate: {error}") from error
            raise StoreAwayError(f"{self._name}: {error}") from error
