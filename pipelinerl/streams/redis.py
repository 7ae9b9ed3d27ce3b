"""Streams on a redis server (7 or newer): one redis stream per partition, with entry ids made from the offsets.

    pipelinerl:<run>:<topic>/<instance>/<partition>            entry `<offset + 1>-0`, field `f` = frame (``frames``)
    pipelinerl:<run>:<topic>/<instance>/<partition>:readers    hash: reader's name → durable position
    pipelinerl:<run>:<topic>/<instance>/<partition>:writer     hash: token of the one writer, next offset
    pipelinerl:sync, pipelinerl:synced:<token>                 requests to sync the log, and their answers

No other keys are touched. An append carries its offset, so that every command may be repeated after a lost connection.
"""

import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from redis.exceptions import ResponseError

from pipelinerl.config.environment import redis_password
from pipelinerl.config.paths import RUN_ADDRESS
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, CorruptStreamError, StreamError
from pipelinerl.streams import frames
from pipelinerl.streams.base import Appender, Backend, Cursor, StreamStats
from pipelinerl.streams.frames import Buffer
from pipelinerl.streams.redis_connection import AWAY, BLOCK_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, RedisConnection
from pipelinerl.streams.spec import SingleStreamSpec, run_key
from pipelinerl.world import WorldMap
from pipelinerl.world.tls import redis_options

log = logging.getLogger(__name__)

_RECORDS_PER_READ = 64
"""Records of one read. The server copies them into one answer."""
_RESTART_S = 60.0
"""Time for a frozen redis to restart, counted from its heartbeat timeout, which detects the freeze."""

# KEYS: stream, writer; ARGV: token. Makes the token's owner the writer and returns the next offset.
_OPEN = """
redis.call('HSETNX', KEYS[2], 'next', '0')
redis.call('HSET', KEYS[2], 'token', ARGV[1])
return tonumber(redis.call('HGET', KEYS[2], 'next'))
"""

# KEYS: stream, writer; ARGV: token, offset, frame. A second arrival of the same append changes nothing.
_APPEND = """
local token, following = unpack(redis.call('HMGET', KEYS[2], 'token', 'next'))
local offset = tonumber(ARGV[2])
if token ~= ARGV[1] then return redis.error_reply('TAKENOVER') end
if tonumber(following) == offset + 1 then return 0 end
if tonumber(following) ~= offset then return redis.error_reply('LOST the stream ends before record ' .. following) end
redis.call('XADD', KEYS[1], string.format('%d-0', offset + 1), 'f', ARGV[3])
redis.call('HSET', KEYS[2], 'next', string.format('%d', offset + 1))
return 1
"""

# KEYS: stream, writer. Returns first and next offset.
_RANGE = """
local following = tonumber(redis.call('HGET', KEYS[2], 'next') or '0')
return {following - redis.call('XLEN', KEYS[1]), following}
"""

# KEYS: stream, writer, readers; ARGV: name, offset. Trims records that every reader has passed, but not the newest.
_COMMIT = """
local before = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '-1')
if tonumber(ARGV[2]) <= before then return 0 end
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
local keep = tonumber(redis.call('HGET', KEYS[2], 'next') or '0')
for _, position in ipairs(redis.call('HVALS', KEYS[3])) do keep = math.min(keep, tonumber(position) + 1) end
return redis.call('XTRIM', KEYS[1], 'MINID', string.format('%d-0', keep))
"""


class RedisBackend(Backend):
    """Streams of one run on one redis server.

    Args:
        run_id: part of the keys that identifies the run. None = derived from each stream's run folder.
        max_record_mb: the reader refuses larger records.
        outage_timeout_s: how long an operation waits for an unreachable server before it fails.
        asks_for_sync: True if the server belongs to the run, whose redis role syncs the log on request. Otherwise
            ``sync`` does nothing, and durability depends on the `appendfsync` that the server's operator chose.
        tls: whether the server speaks TLS.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 6379,
        password: str | None = None,
        run_id: str | None = None,
        max_record_mb: int = 512,
        outage_timeout_s: float = 60.0,
        asks_for_sync: bool = False,
        tls: bool = False,
    ):
        self._asks_for_sync = asks_for_sync
        self._address = {"host": host, "port": port, "password": password} | (redis_options() if tls else {})
        self._run_id = run_id
        self.max_record_bytes = max_record_mb << 20
        self._outage_timeout_s = outage_timeout_s

    @classmethod
    def from_config(
        cls,
        cfg: Config,
        run_dir: Path,
        *,
        host: str | None = None,
        port: int | None = None,
        password: str | None = None,
        tls: bool | None = None,
    ) -> Self:
        """Creates the backend of a run. Missing values come from the configuration, world map and environment."""
        place = redis_place(cfg, run_dir, host=host, port=port)
        return cls(
            host=place[0],
            port=place[1],
            password=password or redis_password(os.environ),
            run_id=place[2],
            max_record_mb=cfg.streams.max_record_mb,
            outage_timeout_s=cfg.launcher.heartbeat_timeout_s + _RESTART_S,
            asks_for_sync=cfg.streams.fsync == "segment" and not cfg.streams.external,
            tls=cfg.world.tls if tls is None else tls,
        )

    def open_appender(self, spec: SingleStreamSpec) -> Appender:
        return RedisAppender(spec, self._key(spec), self._connect())

    def open_cursor(self, spec: SingleStreamSpec, name: str | None, start: int | None) -> Cursor:
        return RedisCursor(spec, self._key(spec), self._connect(), name, start, max_bytes=self.max_record_bytes)

    def specs(self, exp_path: Path) -> list[SingleStreamSpec]:
        prefix = self._prefix(exp_path)
        with self._connect() as server:
            keys = server.call(lambda client: list(client.scan_iter(match=f"{prefix}*", count=1000)))
        names = {key.decode().removeprefix(prefix).partition(":")[0] for key in keys}
        return sorted(
            (
                SingleStreamSpec(exp_path, topic, int(instance), int(partition))
                for topic, instance, partition in (name.split("/") for name in names)
            ),
            key=lambda spec: (spec.topic, spec.instance, spec.partition),
        )

    def check_keeps_all(self) -> None:
        """Raises ``ConfigError`` if the server would delete keys when its memory is full. Others may have set it up."""
        with self._connect() as server:
            policy = server.call(lambda client: client.info("memory"))["maxmemory_policy"]
        if policy != "noeviction":
            raise ConfigError(
                f"redis at {self._address['host']}:{self._address['port']} has `maxmemory-policy` {policy}, with which "
                "it deletes streams and leases when its memory is full: set it to noeviction (CONFIG SET "
                "maxmemory-policy noeviction), or use a redis of its own for the run"
            )

    def stats(self, spec: SingleStreamSpec) -> StreamStats:
        key = self._key(spec)
        with self._connect() as server:
            first, following = server.script(_RANGE, [key, f"{key}:writer"], [])
            size = server.call(lambda client: client.memory_usage(key))
            positions = server.call(lambda client: client.hgetall(f"{key}:readers"))
        return StreamStats(
            spec=spec,
            first_offset=first,
            next_offset=following,
            size_bytes=size or 0,
            positions={name.decode(): int(position) for name, position in sorted(positions.items())},
        )

    def delete(self, spec: SingleStreamSpec) -> None:
        key = self._key(spec)
        with self._connect() as server:
            server.call(lambda client: client.unlink(key, f"{key}:readers", f"{key}:writer"))

    def _prefix(self, exp_path: Path) -> str:
        return f"pipelinerl:{self._run_id or run_key(exp_path)}:"

    def _key(self, spec: SingleStreamSpec) -> str:
        return self._prefix(spec.exp_path) + str(spec)

    def _connect(self) -> RedisConnection:
        return RedisConnection(self._address, self._outage_timeout_s, self._asks_for_sync)


class RedisAppender(Appender):
    def __init__(self, spec: SingleStreamSpec, key: str, server: RedisConnection):
        self._spec = spec
        self._key = key
        self._server = server
        self._token = secrets.token_hex(16)
        self._open = True
        self.next_offset = server.script(_OPEN, [key, f"{key}:writer"], [self._token])

    def append(self, payload: bytes) -> int:
        if not self._open:
            raise StreamError(f"{self._spec}: the writer is closed")
        offset = self.next_offset
        frame = frames.framed(offset, payload)
        try:
            self._server.script(_APPEND, [self._key, f"{self._key}:writer"], [self._token, offset, frame])
        except ResponseError as error:
            if "TAKENOVER" in str(error):
                raise StreamError(f"{self._spec}: another writer has taken this stream over: one writer only") from None
            raise StreamError(f"{self._spec}: redis refused record {offset} ({len(payload)} bytes): {error}") from error
        self.next_offset = offset + 1
        return offset

    def last(self) -> bytes | None:
        if self.next_offset == 0:
            return None
        entry_id = f"{self.next_offset}-0"
        entries = self._server.call(lambda client: client.xrange(self._key, entry_id, entry_id))
        if not entries:
            raise CorruptStreamError(f"{self._spec}: record {self.next_offset - 1}, the newest one, is no longer there")
        return bytes(_payload(entries[0][1], self.next_offset - 1, self._spec, frames.MAX_PAYLOAD_BYTES))

    def sync(self) -> None:
        self._server.sync()

    def barrier(self) -> None:
        """Does nothing: the server has one log, which holds the writes to all streams in their order."""

    def close(self) -> None:
        self._open = False
        self._server.close()


class RedisCursor(Cursor):
    def __init__(
        self,
        spec: SingleStreamSpec,
        key: str,
        server: RedisConnection,
        name: str | None,
        start: int | None,
        *,
        max_bytes: int,
    ):
        self._spec = spec
        self._key = key
        self._server = server
        self._name = name
        self._max_bytes = max_bytes
        self._away_since: float | None = None
        self._keys = [key, f"{key}:writer", f"{key}:readers"]
        first, following = server.script(_RANGE, [key, f"{key}:writer"], [])
        if start is None and name is not None:
            durable = server.call(lambda client: client.hget(f"{key}:readers", name))
            start = None if durable is None else int(durable)
        self.position = first if start is None else start
        if not first <= self.position <= following:
            server.close()
            raise CorruptStreamError(
                f"{spec}: a reader wants to begin at record {self.position}, but the stream holds records {first} to "
                f"{following - 1}"
            )
        if name is not None:
            server.call(lambda client: client.hsetnx(f"{key}:readers", name, str(self.position)))

    def read(self, timeout_s: float) -> list[tuple[int, Buffer]]:
        deadline = time.monotonic() + timeout_s
        pause = FIRST_PAUSE_S
        while True:
            remaining = deadline - time.monotonic()
            try:
                records = self._read_once(min(remaining, BLOCK_S))
                self._away_since = None
            except AWAY as error:
                self._check_outage(error)
                records = []
                time.sleep(max(0.0, min(pause, remaining)))
                pause = min(2 * pause, LONGEST_PAUSE_S)
            if records or time.monotonic() >= deadline:
                return records

    def commit(self, offset: int) -> None:
        if self._name is None:
            raise StreamError(f"{self._spec}: a reader without a name has no durable position to commit")
        self._server.script(_COMMIT, self._keys, [self._name, offset])

    def barrier(self) -> None:
        """Does nothing: the server has one log, which holds the writes to all streams in their order."""

    def sync(self) -> None:
        self._server.sync()

    def skip_damage(self) -> bool:
        found = self._server.call(lambda client: client.xrange(self._key, f"{self.position + 1}-0", count=1))
        if not found:
            return False
        offset = int(found[0][0].split(b"-")[0]) - 1
        self.position = offset if offset > self.position else self.position + 1
        return True

    def close(self) -> None:
        self._server.close()

    def _read_once(self, wait_s: float) -> list[tuple[int, Buffer]]:
        block_ms = int(1000 * wait_s)
        found = self._server.client.xread(
            {self._key: f"{self.position}-0"}, count=_RECORDS_PER_READ, block=block_ms if block_ms > 0 else None
        )
        records: list[tuple[int, Buffer]] = []
        for entry_id, fields in _entries(found):
            offset = int(entry_id.split(b"-")[0]) - 1
            try:
                if offset != self.position:
                    raise CorruptStreamError(f"{self._spec}: records {self.position} to {offset - 1} are missing")
                records.append((offset, _payload(fields, offset, self._spec, self._max_bytes)))
            except CorruptStreamError:
                if records:
                    break  # deliver the records before the damage. The next call starts at the damage and raises
                raise
            self.position = offset + 1
        return records

    def _check_outage(self, error: Exception) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            log.warning("event=redis_away stream=%s error=%s", self._spec, error)
        self._server.check(error, self._away_since)


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Returns the entries of an XREAD of one stream, for either protocol version of the reply."""
    if not found:
        return []
    return next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]


def _payload(fields: dict[bytes, bytes], offset: int, spec: SingleStreamSpec, max_bytes: int) -> memoryview:
    try:
        frame = frames.parse_frame(fields.get(b"f", b""), 0, offset, max_bytes)
    except CorruptStreamError as error:
        raise CorruptStreamError(f"{spec}: {error}") from error
    if frame is None:
        raise CorruptStreamError(f"{spec}: record {offset} is incomplete")
    return frame.payload


def redis_place(
    cfg: Config, run_dir: Path, *, host: str | None = None, port: int | None = None, world: WorldMap | None = None
) -> tuple[str, int, str]:
    """Returns host, port and run id of a run's redis: of a fetched run's address file, else of configuration and map.

    ``host`` and ``port`` override both. ``world``: the map, if it is not in the run folder yet.
    """
    file = run_dir / RUN_ADDRESS
    if file.is_file():
        address = urlsplit(file.read_text(encoding="utf-8").strip())
        assert address.hostname, f"{file} is written by fetch_run"
        return host or address.hostname, port or address.port or 0, address.path.removeprefix("/")
    host, port = host or cfg.streams.host, port or cfg.streams.port
    if host is None or port is None:
        found = _address_in(world or WorldMap.load(run_dir))
        host, port = host or found[0], port or found[1]
    return host, port, run_key(run_dir, cfg.world.run_id)


def _address_in(world: WorldMap) -> tuple[str, int]:
    jobs = world.get("redis")
    if not jobs or jobs[0].port is None:
        raise ConfigError("streams.backend is redis, but the world has no redis job: set streams.host and streams.port")
    return jobs[0].hostname, jobs[0].port
