"""A role whose disk is full: its message, and a supervisor that waits without counting a restart."""

import errno
import logging
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis.exceptions import OutOfMemoryError
from safetensors import SafetensorError

from pipelinerl.config.keys import declared
from pipelinerl.config.sections import LauncherSection
from pipelinerl.errors import EXIT_REFUSED, CheckpointError, ConfigError, StreamError
from pipelinerl.launcher import supervisor
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.engine import RoleExit
from pipelinerl.launcher.supervisor import Supervisor
from pipelinerl.membership.role import EXIT_DISK_FULL, EXIT_FAILED, _code_of

Usage = namedtuple("Usage", "free")
NO_RESTART = {"max_restarts": 0}


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), EXIT_DISK_FULL),
        (caused_by(StreamError("cannot append"), OSError(errno.ENOSPC, "full")), EXIT_DISK_FULL),
        (caused_by(CheckpointError("cannot be written"), OSError(errno.EDQUOT, "quota")), EXIT_DISK_FULL),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), EXIT_DISK_FULL),
        (
            caused_by(
                StreamError("redis refused record 7"),
                OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
            ),
            EXIT_DISK_FULL,
        ),
        (caused_by(StreamError("cannot append"), OSError(errno.EROFS, "read-only")), EXIT_FAILED),
        (ValueError("no"), EXIT_FAILED),
        (caused_by(ConfigError("no"), OSError(errno.ENOSPC, "full")), EXIT_REFUSED),
    ],
)
def test_exit_code_of_a_role_says_that_its_disk_is_full(error: Exception, code: int) -> None:
    assert _code_of(error) == code


class Engine:
    """Each start of the actor ends with the next of these codes."""

    def __init__(self, *codes: int):
        self.codes, self.starts = list(codes), 0

    def start(self, command: RoleCommand) -> None:
        self.starts += 1

    async def exit_of(self, name: str) -> RoleExit:
        return RoleExit(code=self.codes.pop(0))

    async def watch(self) -> None:
        pass

    def stop_all(self, **_: object) -> None:
        pass


async def run(engine: Engine, folder: Path, said: list[str]):
    command = RoleCommand(name="actor_0", kind="actor", argv=(), env={}, cores=())
    limits = LauncherSection(**{key.name: key.default for key in declared(LauncherSection)} | NO_RESTART)
    return await Supervisor(
        [command],
        engine,
        run_dir=folder,
        limits=limits,
        awaited=["actor_0"],
        training_done=lambda: True,
        say=said.append,
        report=lambda: None,
    ).run()


async def test_supervisor_waits_until_space_is_free_at_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter([0, 2**26 - 1, 2**26, 0, 2**26])
    monkeypatch.setattr(supervisor.shutil, "disk_usage", lambda _: Usage(next(free)))
    monkeypatch.setattr(supervisor, "SPACE_POLL_S", 0.0)
    engine, said = Engine(EXIT_DISK_FULL, EXIT_DISK_FULL, 0), []
    (tmp_path / "actor_0").mkdir()
    (tmp_path / "actor_0" / "log.txt").write_text("ERROR cannot append x: No space left on device\n")
    with caplog.at_level(logging.WARNING, "pipelinerl.launcher.supervisor"):
        ending = await run(engine, tmp_path, said)
    assert (ending.kind, dict(ending.restarts), engine.starts) == ("done", {}, 3)
    assert len(said) == 1
    assert said[0].startswith("actor_0: no space is left where it writes; ")
    assert said[0].endswith("; waiting for free space (not counted as a restart)")
    assert [record.getMessage() for record in caplog.records] == [
        "event=waiting_for_space job=actor_0 times=1",
        "event=waiting_for_space job=actor_0 times=2",
    ]
    assert not list(free)


async def test_supervisor_tries_again_after_a_minute_because_the_full_disk_may_be_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 59.9, 60.1])
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(supervisor.shutil, "disk_usage", lambda _: Usage(2**40))
    monkeypatch.setattr(supervisor, "SPACE_POLL_S", 0.0)
    ending = await run(Engine(EXIT_DISK_FULL, 0), tmp_path, [])
    assert (ending.kind, dict(ending.restarts), list(times)) == ("done", {}, [])
