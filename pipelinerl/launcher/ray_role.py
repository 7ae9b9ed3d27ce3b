"""The Ray actor of one role: it starts the role's command as a child process on the node where Ray has put it.

Ray decides where it runs and which GPUs it gets. Everything else is as on one machine: the same command, log, status,
marks and reaper. Nothing but the exit code goes back over Ray.
"""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pipelinerl.config.paths import RUN_CONFIG
from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.launcher.commands import CommandOf, inherited_environment
from pipelinerl.launcher.engine import RoleExit
from pipelinerl.launcher.processes import Host, Reaper, RunMark, stop_roles, wait_for_exit
from pipelinerl.launcher.stopping import LEFTOVER_GRACE_S
from pipelinerl.world import WorldMap
from pipelinerl.world.home import writable_folders

REAPER_GRACE_S = 5.0


class RolePlace(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor needs to start its role, besides what lies in the run folder."""

    job: str
    run_dir: str
    cwd: str
    """The launcher's working folder, used if this node has it."""
    secrets: dict[str, str]


class RoleActor:
    """Runs one role. Its methods share an event loop, so that a role can be ended while it is awaited."""

    def __init__(self, place: RolePlace, command_of: CommandOf):
        self._place, self._command_of = place, command_of
        self._host: Host | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def run(self) -> RoleExit:
        """Start the role and return how it ended. None of its processes is left then."""
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
        try:
            self._process = self._host.start(command)
            print(f"{place.job}: process {self._process.pid}, log {run_dir / place.job / 'log.txt'}", flush=True)
            code = await wait_for_exit(self._process)
            await asyncio.to_thread(self._host.sweep, place.job, LEFTOVER_GRACE_S)
        finally:
            reaper.dismiss()
        return RoleExit(code=code)

    async def stop(self, limit_s: float) -> None:
        """Send the role SIGTERM and wait. After ``limit_s`` it is killed."""
        if self._host is None or self._process is None:
            return
        name, ranks = self._place.job, self._host.ranks_of(self._place.job)
        await asyncio.to_thread(stop_roles, {name: self._process}, {name: limit_s}, {name: ranks}, lambda: False)
        await self.kill()

    async def kill(self) -> None:
        """End the role's processes at once."""
        if self._host is not None:
            await asyncio.to_thread(self._host.sweep, self._place.job, 0)


def role_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a Ray worker that its role inherits: neither Ray's own nor its token.

    Ray also sets OMP_NUM_THREADS, to the CPUs of the request.
    """
    kept = inherited_environment(env)
    return {name: value for name, value in kept.items() if not name.startswith("RAY_") and name != "OMP_NUM_THREADS"}
