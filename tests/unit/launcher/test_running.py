"""What becomes of the run when a part of the launcher itself fails."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config, LauncherSection
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.engine import RoleExit
from pipelinerl.launcher.program import report_exit
from pipelinerl.launcher.reporting import ending_record
from pipelinerl.launcher.running import accompanied
from pipelinerl.launcher.supervisor import Ending, Supervisor


def config(*overrides: str) -> Config:
    return parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", *overrides]))


COMMAND = RoleCommand(name="actor_0", kind="actor", argv=("role",), env={}, cores=())


class EndlessRoles:
    """An engine whose roles never end. ``fails`` names the method that raises."""

    def __init__(self, fails: str = ""):
        self._fails = fails
        self.is_stopped = False

    def start(self, command: RoleCommand) -> None:
        if self._fails == "start":
            raise OSError(12, "Cannot allocate memory")

    async def exit_of(self, name: str) -> RoleExit:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def watch(self) -> None:
        if self._fails == "watch":
            raise ValueError("a status is not a record")
        await asyncio.Event().wait()

    def stop_all(self, *, orderly: bool, may_save: bool, report: Callable[[], None]) -> None:
        assert not orderly
        self.is_stopped = True


class NoTopics:
    """Follows no topic."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


async def lose_the_model() -> None:
    await asyncio.sleep(0)
    raise PermissionError(13, "Permission denied", "builder")


async def last() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("fails", "beside", "reason"),
    [
        ("", lose_the_model, "lose_the_model: PermissionError: [Errno 13] Permission denied: 'builder'"),
        ("start", last, "supervising actor_0: OSError: [Errno 12] Cannot allocate memory"),
        ("watch", last, "watching the roles: ValueError: a status is not a record"),
    ],
)
async def test_launcher_part_that_fails_ends_the_run_with_its_error(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fails: str,
    beside: Callable[[], Coroutine[Any, Any, None]],
    reason: str,
) -> None:
    engine = EndlessRoles(fails)
    supervisor = Supervisor(
        [COMMAND],
        engine,
        run_dir=tmp_path,
        limits=LauncherSection.model_construct(max_restarts=0),
        awaited=["actor_0"],
        training_done=lambda: False,
        say=lambda line: None,
        report=lambda: None,
    )
    works = iter([last(), beside()])
    with caplog.at_level(logging.ERROR):
        ending = await asyncio.wait_for(accompanied(supervisor, works, NoTopics()), 60)  # type: ignore[arg-type]
        assert report_exit(ending, config()) == 1
    assert (ending.kind, ending.reason) == ("failed", f"the launcher itself failed in {reason}")
    assert engine.is_stopped
    assert ending_record(ending).reason == ending.reason
    assert [record.exc_info is not None for record in caplog.records] == [True]  # the log has the traceback


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((), "the same command resumes"),
        (("force_restart=true",), "the same command without force_restart=true resumes"),
        (("resume=checkpoint",), "the same command without resume=checkpoint resumes"),
    ],
)
def test_stopped_run_says_what_goes_on_with_it(
    asked: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command would delete what it has made, or set the streams with its samples aside."""
    report_exit(Ending(kind="stopped", reason="SIGINT"), config(*asked))
    assert f"stopped by SIGINT; {said} x" in capsys.readouterr().out.replace("\n", " ")
