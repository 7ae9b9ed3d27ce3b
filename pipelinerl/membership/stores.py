"""The stores of leases: in a run folder that all roles share, or on the run's redis server, beside its streams.

    <run folder>/members/<name>.json     a lease, replaced as a whole with each renewal
    <run folder>/members/<name>.leave    this member was asked to leave

    pipelinerl-run:<run>:members         hash: name → lease
    pipelinerl-run:<run>:leave           set: names that are asked to leave
    pipelinerl-run:<run>:documents       hash: configuration and world, for roles that start without the run folder

On redis a write that depends on the stored value is one Lua script, which the server executes atomically.
"""

import contextlib
import os
import secrets
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pipelinerl.errors import PipelineRLError
from pipelinerl.membership.lease import Lease
from pipelinerl.world.disk import replace_file

FOLDER = "members"
TIMEOUT_S = 5.0
"""Longest wait for an answer of redis. A lease (`launcher.lease_ttl_s`, 30 s) outlives several that do not come."""

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


class StoreAwayError(PipelineRLError):
    """The leases cannot be read or written now. The same call may work later."""


class StoreRefusedError(StoreAwayError):
    """The store refuses this process, which does not have the run's secret."""


class LeaseStore(Protocol):
    """The leases of one run. Every method raises ``StoreAwayError`` if the store does not answer."""

    def claim(self, lease: Lease) -> bool:
        """Write a lease if its name is free. Returns False if the name is taken."""
        ...

    def overwrite(self, lease: Lease) -> None:
        """Write a lease even if the name was taken. Deletes a request to leave, which was the previous holder's."""
        ...

    def renew(self, lease: Lease) -> bool:
        """Write this incarnation's lease, also if it was deleted. Returns False if another incarnation has the name."""
        ...

    def remove(self, lease: Lease) -> None:
        """Delete the lease of this incarnation if it is still there."""
        ...

    def leases(self) -> dict[str, Lease]:
        """Return every lease that can be read, by name."""
        ...

    def ask_to_leave(self, name: str) -> None:
        """Ask the member with this name to drain and end."""
        ...

    def is_asked_to_leave(self, name: str) -> bool:
        """Whether the member with this name was asked to leave."""
        ...


class FolderStore:
    """Leases as files in a run folder that all roles share."""

    def __init__(self, run_dir: Path):
        self._folder = Path(run_dir) / FOLDER

    def claim(self, lease: Lease) -> bool:
        with _disk():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._folder / f".{lease.name}.{secrets.token_hex(4)}"
            replace_file(temporary, msgspec.json.encode(lease), mode=0o600)
            try:
                os.link(temporary, self._path(lease.name))
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            return True

    def overwrite(self, lease: Lease) -> None:
        with _disk():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._leave_path(lease.name).unlink(missing_ok=True)
            replace_file(self._path(lease.name), msgspec.json.encode(lease), mode=0o600)

    def renew(self, lease: Lease) -> bool:
        with _disk():
            holder = self._read(self._path(lease.name))
            if holder is not None and holder.incarnation != lease.incarnation:
                return False
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path(lease.name), msgspec.json.encode(lease), mode=0o600)
            return True

    def remove(self, lease: Lease) -> None:
        with _disk():
            holder = self._read(self._path(lease.name))
            if holder is not None and holder.incarnation == lease.incarnation:
                self._path(lease.name).unlink(missing_ok=True)
                self._leave_path(lease.name).unlink(missing_ok=True)

    def leases(self) -> dict[str, Lease]:
        with _disk():
            found = [self._read(path) for path in sorted(self._folder.glob("[!.]*.json"))]
        return {lease.name: lease for lease in found if lease is not None}

    def ask_to_leave(self, name: str) -> None:
        with _disk():
            self._leave_path(name).touch(mode=0o600)

    def is_asked_to_leave(self, name: str) -> bool:
        with _disk():
            return self._leave_path(name).exists()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _leave_path(self, name: str) -> Path:
        return self._folder / f"{name}.leave"

    def _read(self, path: Path) -> Lease | None:
        """Read a lease. None if there is no file or it holds no lease of this name."""
        with contextlib.suppress(FileNotFoundError):
            return decode_lease(path.stem, path.read_bytes())
        return None


def decode_lease(name: str, content: bytes) -> Lease | None:
    """Decode a lease. None if the bytes are no lease of this name."""
    try:
        lease = msgspec.json.decode(content, type=Lease)
    except ValueError:
        return None
    return lease if lease.name == name else None


@contextlib.contextmanager
def _disk():
    try:
        yield
    except OSError as error:
        raise StoreAwayError(f"the leases in the run folder: {error}") from error


class RedisStore:
    """Leases of one run on one redis server.

    Args:
        server: host, port, password and TLS options of the server, as the redis client takes them.
        run_id: the run's name in the keys.
    """

    def __init__(self, server: Mapping[str, Any], run_id: str):
        self._name = f"redis at {server['host']}:{server['port']}"
        self._prefix = f"pipelinerl-run:{run_id}"
        import redis  # not for runs in a folder
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        once = Retry(NoBackoff(), 0)
        self._client: Any = redis.Redis(
            **server, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=once
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
        from redis.exceptions import AuthenticationError, RedisError

        try:
            yield
        except AuthenticationError as error:
            raise StoreRefusedError(f"{self._name} refuses the password: {error}") from error
        except RedisError as error:
            if isinstance(error.__context__, ssl.SSLCertVerificationError):  # the authority follows from the secret
                raise StoreRefusedError(f"{self._name} has another certificate: {error}") from error
            raise StoreAwayError(f"{self._name}: {error}") from error
