"""The redis server's configuration and command, as values."""

from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.streams import redis_server
from pipelinerl.streams.redis_server import redis_command, redis_config
from tests.says import says


def lines(**changes: object) -> list[str]:
    values = {
        "port": 7001,
        "data_dir": Path("/run folder/redis_0/data"),
        "password": "secret",
        "address": None,
        "fsync": "segment",
        "max_record_mb": 64,
        **changes,
    }
    return redis_config(**values).splitlines()  # type: ignore[arg-type]


def test_config_of_one_node_is_loopback_with_password_and_append_only_file():
    assert lines() == [
        "bind 127.0.0.1",
        "protected-mode yes",
        "port 7001",
        'dir "/run folder/redis_0/data"',
        "appendonly yes",
        "appendfsync no",
        'save ""',
        "maxmemory-policy noeviction",
        "proto-max-bulk-len 512mb",
        "daemonize no",
        "databases 1",
        'requirepass "secret"',
    ]


def test_config_of_several_nodes_listens_on_the_nodes_address_and_needs_a_password():
    assert lines(address="192.0.2.7")[0] == "bind 127.0.0.1 192.0.2.7"
    assert lines(address="")[0] == "bind * -::*"
    with pytest.raises(ConfigError, match="PIPELINERL_REDIS_PASSWORD is not set"):
        lines(address="192.0.2.7", password=None)


def test_config_follows_fsync_and_record_size_and_quotes():
    assert "appendfsync always" in lines(fsync="always")
    assert "appendfsync no" in lines(fsync="never")
    assert "proto-max-bulk-len 1025mb" in lines(max_record_mb=1024)
    assert lines(password='a"b\\c')[-1] == r'requirepass "a\"b\\c"'
    assert not any(line.startswith("requirepass") for line in lines(password=None))
    with pytest.raises(ConfigError, match="control characters"):
        lines(password="a\nrename-command")


def test_command_without_redis_server_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_server.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="apt install redis-server"):
        redis_command()


def test_command_of_an_old_server_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho 'Redis server v=6.2.1 sha=0 malloc=libc bits=64'\n")
    program.chmod(0o755)
    monkeypatch.setattr(redis_server.shutil, "which", lambda _: str(program))
    with pytest.raises(ConfigError, match=says("version 6", "streams=redis", 7)):
        redis_command()
