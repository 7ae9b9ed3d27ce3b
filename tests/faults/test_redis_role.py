"""The redis role: answers, ends when told, and fails when its server dies or freezes, so that it is started anew."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import redis

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.streams import redis_server
from pipelinerl.streams.redis_server import redis_command, run_redis


class Role:
    """The role running in a thread, with the parts of a context that it uses."""

    def __init__(self, run_dir: Path, executor: ThreadPoolExecutor):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.stop = threading.Event()
        self.progress = threading.Event()
        self.run_dir = run_dir
        context = SimpleNamespace(
            run_dir=run_dir,
            job=SimpleNamespace(name="redis_0", port=self.port),
            world=SimpleNamespace(nodes=("node",)),
            cfg=SimpleNamespace(streams=SimpleNamespace(fsync="segment", max_record_mb=8)),
            status=SimpleNamespace(progress=self.progress.set),
            stop=self.stop,
        )
        self.result: Future[None] = executor.submit(run_redis, context)  # type: ignore[arg-type]

    def server(self) -> psutil.Process:
        (process,) = [p for p in psutil.Process().children() if f":{self.port}" in " ".join(p.cmdline())]
        return process


@pytest.fixture
def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    try:
        redis_command()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PIPELINERL_REDIS_PASSWORD", "secret")
    monkeypatch.setattr(redis_server, "_PING_EVERY_S", 0.05)
    monkeypatch.setattr(redis_server, "_PING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(redis_server, "_STOP_S", 1.0)
    with ThreadPoolExecutor(1) as executor:
        role = Role(tmp_path, executor)
        assert role.progress.wait(30), "the server did not answer"
        yield role
        role.stop.set()


def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


def test_role_serves_until_told_to_stop_and_leaves_its_data(role: Role):
    with redis.Redis(port=role.port, password="secret") as client:
        client.set("key", "value")
    server = role.server()
    role.stop.set()
    role.result.result(30)
    assert not server.is_running()
    data = role.run_dir / "redis_0" / "data"
    assert data.stat().st_mode & 0o777 == 0o700
    assert any(b"value" in path.read_bytes() for path in data.rglob("*.aof"))


def test_role_fails_when_its_server_is_killed(role: Role):
    role.server().kill()
    with pytest.raises(StreamError, match="redis-server ended with code -9"):
        role.result.result(30)


def test_role_fails_when_its_server_freezes(role: Role, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_server, "_SILENCE_S", 0.5)
    server = role.server()
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(StreamError, match=rf"redis-server \(process {server.pid}\) has not answered for 0\.5 s"):
        role.result.result(30)
    wait_until(lambda: not server.is_running())
