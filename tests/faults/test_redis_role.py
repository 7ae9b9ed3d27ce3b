"""The redis role: answers, ends when told, fails when its server dies, falls silent when that freezes."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import redis
from omegaconf import OmegaConf

from pipelinerl.config.load import compose, to_container
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.inspect import streams as command
from pipelinerl.inspect.reading import environment_of_live_roles, look_into
from pipelinerl.membership import redis_role
from pipelinerl.membership.redis_role import run_redis
from pipelinerl.observability.status import StatusRecord, write_status
from pipelinerl.records import TrainingDone
from pipelinerl.records.messages import TrainerMessage
from pipelinerl.streams import SingleStreamSpec, open_writer, redis_server
from pipelinerl.streams.redis import RedisBackend
from pipelinerl.streams.redis_server import redis_command
from tests.ports import free_port
from tests.says import says


class Role:
    """The role running in a thread, with the parts of a context that it uses."""

    def __init__(self, run_dir: Path, executor: ThreadPoolExecutor):
        self.port = free_port()
        self.stop = threading.Event()
        self.progress, self.lent = threading.Event(), threading.Event()
        self.run_dir = run_dir
        context = SimpleNamespace(
            run_dir=run_dir,
            job=SimpleNamespace(name="redis_0", hostname="127.0.0.1", port=self.port),
            world=SimpleNamespace(is_open=False),
            cfg=SimpleNamespace(
                streams=SimpleNamespace(fsync="segment", max_record_mb=8), world=SimpleNamespace(tls=False)
            ),
            status=SimpleNamespace(progress=self.progress.set, beat_with_progress=self.lent.set),
            stop=self.stop,
        )
        self.result: Future[None] = executor.submit(run_redis, context)  # type: ignore[arg-type]

    def is_beating(self) -> bool:
        """Whether a heartbeat came within four pings' time-outs."""
        self.progress.clear()
        return self.progress.wait(4 * redis_server.PING_TIMEOUT_S)

    def server(self) -> psutil.Process:
        (process,) = [p for p in psutil.Process().children(recursive=True) if f":{self.port}" in " ".join(p.cmdline())]
        return process


@pytest.fixture
def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    try:
        redis_command()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PIPELINERL_REDIS_PASSWORD", "secret")
    monkeypatch.setattr(redis_role, "_WAIT_S", 0.05)
    monkeypatch.setattr(redis_server, "PING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(redis_server, "_STOP_S", 1.0)
    with ThreadPoolExecutor(1) as executor:
        role = Role(tmp_path, executor)
        assert role.progress.wait(60), "the server did not answer"
        yield role
        role.stop.set()


def wait_until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.01)


def test_role_serves_until_told_to_stop_and_leaves_its_data(role: Role):
    with redis.Redis(port=role.port, password="secret") as client:
        client.set("key", "value")
    server = role.server()
    role.stop.set()
    role.result.result(60)
    assert not server.is_running()
    data = role.run_dir / "redis_0" / "data"
    assert data.stat().st_mode & 0o777 == 0o700
    assert any(b"value" in path.read_bytes() for path in data.rglob("*.aof"))


def test_sync_returns_when_the_role_has_synced_the_servers_log(role: Role, monkeypatch: pytest.MonkeyPatch):
    synced: dict[str, bytes] = {}

    def sync(path: Path) -> None:
        synced[path.name] = path.read_bytes() if path.is_file() else b""

    monkeypatch.setattr(redis_role, "sync_path", sync)
    backend = RedisBackend(port=role.port, password="secret", run_id="r", asks_for_sync=True)
    spec = SingleStreamSpec(role.run_dir, "actor")
    appender = backend.open_appender(spec)
    appender.append(b"a record to keep")
    appender.barrier()
    assert not synced, "one log keeps the order of all streams by itself"
    appender.sync()
    assert {"data", "appendonlydir", "appendonly.aof.manifest"} <= synced.keys()
    assert any(b"a record to keep" in content for content in synced.values())
    synced.clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: backend.open_cursor(spec, None, 0).sync(), range(8)))
    assert synced
    appender.close()


def test_ended_runs_redis_is_read_by_the_commands_and_by_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    required = [f"output_dir={tmp_path}", "dataset_loader=a.load", "actor.rollout_policy=a.rollout", "streams=redis"]
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.create(to_container(compose("base", required))))
    )
    data_dir = tmp_path / "redis_0" / "data"
    data_dir.mkdir(parents=True)
    monkeypatch.delenv("PIPELINERL_REDIS_PASSWORD", raising=False)
    spec = SingleStreamSpec(tmp_path, "trainer")
    with look_into(tmp_path), open_writer(spec, TrainerMessage) as writer:
        for step in (1, 2):
            writer.write(TrainingDone(step=step))
    before = {path: path.read_bytes() for path in data_dir.rglob("*.aof")}
    assert command.main(["tail", str(tmp_path), "trainer"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["offset"], line["record"]["step"]) for line in lines] == [(0, 1), (1, 2)]
    assert {path: path.read_bytes() for path in data_dir.rglob("*.aof")} == before
    with look_into(tmp_path), pytest.raises(StreamError, match="in use by another redis-server"), look_into(tmp_path):
        pass


def test_password_is_that_of_a_live_role_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert environment_of_live_roles(tmp_path) == {}
    environment = {"PIPELINERL_ROLE": "token/actor_0", "PIPELINERL_REDIS_PASSWORD": "theirs"}
    role = subprocess.Popen(["sleep", "600"], env=os.environ | environment)
    try:
        (tmp_path / "status").mkdir()
        record = StatusRecord(
            job="actor_0",
            state="running",
            pid=role.pid,
            hostname="here",
            started=0.0,
            heartbeat=0.0,
            progress_at=0.0,
            progress_count=0,
            waits=(),
            fields={},
        )
        write_status(tmp_path / "status" / "actor_0.json", record)
        wait_until(lambda: environment_of_live_roles(tmp_path).get("PIPELINERL_REDIS_PASSWORD") == "theirs")
    finally:
        role.kill()
        role.wait()
    assert environment_of_live_roles(tmp_path) == {}


def test_role_fails_when_its_server_is_killed(role: Role):
    role.server().kill()
    with pytest.raises(StreamError, match=says("redis-server", -9)):
        role.result.result(60)


def test_role_lends_its_heartbeat_to_the_server_and_ends_a_frozen_one(role: Role):
    assert role.lent.wait(60)
    server = role.server()
    os.kill(server.pid, signal.SIGSTOP)
    wait_until(lambda: not role.is_beating())
    role.stop.set()
    role.result.result(60)
    wait_until(lambda: not server.is_running())
