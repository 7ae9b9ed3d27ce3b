"""The Ray actor of one role: it runs the role's command as a child process on the node where Ray has put it.

It uses the engine of one machine, so command, log, watch, marks and reaper are the same. Only the exit goes over Ray.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pipelinerl.config.paths import RUN_CONFIG
from pipelinerl.config.sections import LauncherSection
from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.launcher.commands import CommandOf, inherited_environment
from pipelinerl.launcher.engine import RoleExit
from pipelinerl.launcher.local import LocalEngine
from pipelinerl.launcher.processes import REAPER_GRACE_S, Host, Reaper, RunMark
from pipelinerl.world import WorldMap
from pipelinerl.world.home import writable_folders


class RolePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Values with which an actor starts its role, besides the run folder's."""

    job: str
    run_dir: str
    cwd: str
    """The launcher's working folder, used if this node has it."""
    limits: LauncherSection
    secrets: dict[str, str]


class RoleActor:
    """Runs one role. Its methods share an event loop, so that a role can be ended while it is awaited."""

    def __init__(self, place: RolePlace, command_of: CommandOf):
        self._place, self._command_of = place, command_of
        self._host: Host | None = None
        self._engine: LocalEngine | None = None

    async def run(self) -> RoleExit:
        """Start the role, watch it, and return how it ended, with none of its processes left."""
        place, run_dir = self._place, Path(self._place.run_dir)
        if not (run_dir / RUN_CONFIG).is_file():
            reason = f"node {os.uname().nodename} does not see {run_dir}: put output_dir where all Ray nodes see it"
            return RoleExit(code=EXIT_REFUSED, kill_reason=reason)
        with contextlib.suppress(OSError):
            os.chdir(place.cwd)
        world = WorldMap.load(run_dir)
        command = self._command_of(world.job(place.job), world, run_dir, os.environ)
        mark = RunMark()
        reaper = Reaper(mark, REAPER_GRACE_S, owner=f"{run_dir} role {place.job}")
        environment = writable_folders(os.environ) | role_variables(os.environ) | place.secrets
        self._host = Host(run_dir=run_dir, environment=environment | {"TMPDIR": reaper.temporary}, mark=mark)
        self._engine = LocalEngine(self._host, [place.job], place.limits, print)
        try:
            async with asyncio.TaskGroup() as group:
                self._engine.start(command)
                watch = group.create_task(self._engine.watch())
                end = await self._engine.exit_of(place.job)
                watch.cancel()
        finally:
            reaper.dismiss()
        return end

    async def stop(self, limit_s: float, may_save: bool) -> None:
        """Ask the role to end, wait for it (`LocalEngine.stop_kinds`), and kill remaining processes."""
        if self._engine is not None:
            kinds = [self._place.job.rpartition("_")[0]]
            await asyncio.to_thread(self._engine.stop_kinds, kinds, limit_s, may_save=may_save)
            await self.kill()

    async def kill(self) -> None:
        """End the role's processes at once."""
        if self._host is not None:
            await asyncio.to_thread(self._host.sweep, self._place.job, 0)


def role_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a Ray worker that its role inherits: neither Ray's own nor its token."""
    kept = inherited_environment(env)  # Ray also sets OMP_NUM_THREADS, to the CPUs of the request
    return {name: value for name, value in kept.items() if not name.startswith("RAY_") and name != "OMP_NUM_THREADS"}
