"""Streams on a redis server that is killed, frozen, away, protected by a password, or shared with others."""

import contextlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from pipelinerl.errors import ConfigError, CorruptStreamError, StreamError
from pipelinerl.streams import SingleStreamSpec, redis_connection
from pipelinerl.streams.redis import RedisBackend
from pipelinerl.streams.redis_server import redis_command, redis_config, start_redis, stop_redis
from tests.ports import free_port
from tests.says import says
from tests.waiting import wait_until

PASSWORD = 'a "quoted" \\ password'


class Server:
    """A redis server that can be killed and started again with what it had."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self.config = redis_config(
            port=self.port, data_dir=folder, password=PASSWORD, address=None, fsync="segment", max_record_mb=64
        )
        self.log = folder / "log.txt"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = start_redis(self.config, log)

    @property
    def own(self) -> psutil.Process:
        """redis-server itself, below its keeper."""
        assert self.process is not None
        (server,) = psutil.Process(self.process.pid).children()
        return server

    def signal(self, number: int) -> None:
        self.own.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.own.kill()
        self.process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=PASSWORD)

    def backend(self, **options: Any) -> RedisBackend:
        return RedisBackend(**{"port": self.port, "password": PASSWORD, "run_id": "mine", **options})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    try:
        redis_command()
    except ConfigError as error:
        pytest.skip(str(error))
    server = Server(tmp_path)
    yield server
    assert server.process is not None
    stop_redis(server.process)


@pytest.fixture
def spec(tmp_path: Path) -> SingleStreamSpec:
    return SingleStreamSpec(tmp_path, "actor")


class Traffic:
    """A writer and a reader, each in its thread, until stopped."""

    def __init__(self, backend: RedisBackend, spec: SingleStreamSpec):
        self.written = 0
        self.seen: list[int] = []
        self.errors: list[Exception] = []
        self._writing, self._reading = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(role, backend, spec)) for role in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._writing.set()
        self._threads[0].join()
        wait_until(lambda: len(self.seen) >= self.written or bool(self.errors))
        self._reading.set()
        self._threads[1].join()

    def _guard(self, role: Callable[..., None], backend: RedisBackend, spec: SingleStreamSpec) -> None:
        try:
            role(backend, spec)
        except Exception as error:
            self.errors.append(error)

    def _write(self, backend: RedisBackend, spec: SingleStreamSpec) -> None:
        appender = backend.open_appender(spec)
        while not self._writing.is_set():
            assert appender.append(payload(self.written)) == self.written
            self.written += 1
        appender.close()

    def _read(self, backend: RedisBackend, spec: SingleStreamSpec) -> None:
        cursor = backend.open_cursor(spec, "r", None)
        while not self._reading.is_set():
            for offset, found in cursor.read(0.1):
                assert bytes(found) == payload(offset)
                self.seen.append(offset)
            cursor.commit(max(0, len(self.seen) - 100))
        cursor.close()


def payload(offset: int) -> bytes:
    return b"%d " % offset + bytes(offset * 7919 % 20_000)


def test_server_killed_and_restarted_loses_and_doubles_nothing(server: Server, spec: SingleStreamSpec):
    traffic = Traffic(server.backend(), spec)
    rng = random.Random(5)
    try:
        for _ in range(4):
            target = len(traffic.seen) + rng.randrange(50, 300)
            wait_until(lambda target=target: len(traffic.seen) >= target or bool(traffic.errors))
            server.kill()
            server.start()
    finally:
        traffic.stop()
    assert traffic.errors == []
    assert traffic.seen == list(range(traffic.written))


def test_commands_repeated_to_a_frozen_server_arrive_once(
    server: Server, spec: SingleStreamSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(redis_connection, "_SOCKET_TIMEOUT_S", 0.3)
    monkeypatch.setattr("pipelinerl.streams.redis.BLOCK_S", 0.1)
    traffic = Traffic(server.backend(), spec)
    try:
        wait_until(lambda: len(traffic.seen) >= 100 or bool(traffic.errors))
        caplog.clear()
        server.signal(signal.SIGSTOP)
        wait_until(lambda: caplog.text.count("event=redis_away server=") >= 2)
        server.signal(signal.SIGCONT)
        target = len(traffic.seen) + 100
        wait_until(lambda: len(traffic.seen) >= target or bool(traffic.errors))
    finally:
        server.signal(signal.SIGCONT)
        traffic.stop()
    assert traffic.errors == []
    assert traffic.seen == list(range(traffic.written))


def test_server_that_stays_away_is_an_error_that_names_it(server: Server, spec: SingleStreamSpec):
    backend = server.backend(outage_timeout_s=0.2)
    appender, cursor = backend.open_appender(spec), backend.open_cursor(spec, "r", None)
    server.kill()
    message = rf"redis at 127\.0\.0\.1:{server.port} did not answer for 0\.2 s"
    with pytest.raises(StreamError, match=message):
        appender.append(b"x")
    with contextlib.suppress(StreamError):  # on a busy machine that is more than the outage may last
        assert cursor.read(0.01) == [], "a reader waits no longer than it was asked to"
    with pytest.raises(StreamError, match=message):
        cursor.read(10)
    server.start()


def test_wrong_password_is_refused_at_once(server: Server, spec: SingleStreamSpec):
    with redis.Redis(port=server.port) as client, pytest.raises(redis.AuthenticationError):
        wait_for_answer(client)
    for password in ("wrong", None):
        with pytest.raises(StreamError, match=r"refuses the password in PIPELINERL_REDIS_PASSWORD"):
            server.backend(password=password).open_appender(spec)


def wait_for_answer(client: redis.Redis) -> None:
    """Until the server is up and has answered, one way or the other."""
    end = time.monotonic() + 60
    while True:
        try:
            client.ping()
            return
        except redis.AuthenticationError:
            raise
        except redis.ConnectionError:
            assert time.monotonic() < end, "redis-server did not come up"


def test_server_listens_on_loopback_only_and_tells_no_secret(server: Server):
    assert server.client().ping()
    process = server.own
    assert {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"} == {"127.0.0.1"}
    assert PASSWORD not in " ".join(process.cmdline())
    assert not any(PASSWORD.encode() in path.read_bytes() for path in server.log.parent.rglob("*") if path.is_file())


def test_second_writer_takes_over_and_the_first_is_refused(server: Server, spec: SingleStreamSpec):
    backend = server.backend()
    first = backend.open_appender(spec)
    first.append(b"0")
    second = backend.open_appender(spec)
    with pytest.raises(StreamError, match="another writer has taken this stream over"):
        first.append(b"1")
    assert second.append(b"1 of the second") == 1
    assert second.last() == b"1 of the second"
    first.close()
    second.close()


def test_records_behind_every_reader_are_trimmed_and_the_newest_stays(server: Server, spec: SingleStreamSpec):
    backend = server.backend()
    appender = backend.open_appender(spec)
    fast, slow = backend.open_cursor(spec, "fast", None), backend.open_cursor(spec, "slow", None)
    for number in range(10):
        appender.append(b"%d" % number)
    fast.commit(8)
    assert backend.stats(spec).first_offset == 0
    slow.commit(3)
    assert backend.stats(spec).first_offset == 3
    with pytest.raises(StreamError, match=says("record 2", "records 3 to 9")):
        backend.open_cursor(spec, "late", 2)
    fast.commit(10)
    slow.commit(10)
    stats = backend.stats(spec)
    assert (stats.first_offset, stats.next_offset, stats.positions) == (9, 10, {"fast": 10, "slow": 10})
    assert appender.last() == b"9"
    appender.append(b"10")
    assert [(offset, bytes(found)) for offset, found in backend.open_cursor(spec, "fast", None).read(1)] == [
        (10, b"10")
    ]


def test_another_runs_keys_are_left_alone(server: Server, spec: SingleStreamSpec):
    mine, other = server.backend(), server.backend(run_id="other")
    with server.client() as client:
        client.set("somebody's", "value")
        for backend in (mine, other):
            backend.open_appender(spec).append(b"record")
        mine.open_cursor(spec, "r", None).close()
        assert mine.specs(spec.exp_path) == [spec]
        mine.delete(spec)
        assert mine.specs(spec.exp_path) == []
        assert other.specs(spec.exp_path) == [spec]
        assert other.stats(spec).next_offset == 1
        assert client.get("somebody's") == b"value"
        assert {key.decode() for key in client.scan_iter()} == {
            "somebody's",
            "pipelinerl:other:actor/0/0",
            "pipelinerl:other:actor/0/0:writer",
        }


def test_damaged_or_missing_entries_are_errors(server: Server, spec: SingleStreamSpec):
    backend = server.backend()
    appender = backend.open_appender(spec)
    for number in range(3):
        appender.append(b"%d" % number)
    key = "pipelinerl:mine:actor/0/0"
    with server.client() as client:
        ((_, fields),) = client.xrange(key, "3-0", "3-0")
        cursor = backend.open_cursor(spec, None, 0)
        client.xdel(key, "2-0")
        assert [(offset, bytes(found)) for offset, found in cursor.read(0)] == [(0, b"0")]
        with pytest.raises(CorruptStreamError, match="records 1 to 1 are missing"):
            cursor.read(0)
        client.delete(key)
        client.xadd(key, {"f": fields[b"f"][:-1] + b"!"}, id="3-0")
        with pytest.raises(CorruptStreamError, match=says("record 2", "1 bytes", "checksum")):
            backend.open_cursor(spec, None, 2).read(0)
        client.hset(f"{key}:writer", "next", "2")
        with pytest.raises(StreamError, match="LOST the stream ends before record 2"):
            appender.append(b"3")


def test_idle_reader_and_its_wake_up(server: Server, spec: SingleStreamSpec):
    backend = server.backend()
    appender, cursor = backend.open_appender(spec), backend.open_cursor(spec, None, None)
    assert cursor.read(0) == []
    start = time.monotonic()
    assert cursor.read(0.2) == []
    assert 0.15 <= time.monotonic() - start < 60
    timer = threading.Timer(0.05, appender.append, [b"x"])
    timer.start()
    assert [bytes(found) for _, found in cursor.read(10)] == [b"x"]
    timer.join()
