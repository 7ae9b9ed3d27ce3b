"""A workspace in the embedded jail (``domains.sandbox``), one jail for each.

The folder is memory of the jail's mount namespace, which no other process can name, so nothing is left of it when the
jail ends, whatever ended it. The jail ends when its workspace is removed, or when this process dies.
"""

import asyncio
import base64
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Self
from urllib.parse import urlsplit

from pipelinerl.agents import RecordedAgent
from pipelinerl.domains.sandbox import Limits, Outcome
from pipelinerl.domains.sandbox.runner import MODES, Jail, as_outcome, interpreter, start_jail, supervise
from pipelinerl.domains.workspace.base import LIMITS, Workspace
from pipelinerl.errors import VerifierError

PATHS = f"{os.path.dirname(interpreter())}:/usr/local/bin:/usr/bin:/bin"


@functools.cache
def usable_mode() -> str:
    """Returns the strongest mode that works here. Raises ``VerifierError`` if none does."""
    mode, jail = start_jail(MODES)
    jail.close()
    return mode


class JailWorkspace(Workspace):
    """A folder that all runs share. Commands see system folders and the interpreter read-only, and a /tmp of their own.

    Example:
        >>> # async with await JailWorkspace.make(pack_folder(template)) as workspace:
        >>> #     outcome = await workspace.run(["sh", "-c", "ls"])
    """

    def __init__(self, jail: Jail, mode: str, limits: Limits):
        self.limits = limits
        self._jail, self._mode = jail, mode

    @classmethod
    async def make(
        cls,
        content: bytes,
        agent: RecordedAgent | None = None,
        *,
        limits: Limits = LIMITS,
        readable: Sequence[str] = (),
        mode: str | None = None,
    ) -> Self:
        """Starts a jail and unpacks the content in it.

        Args:
            content: a template or a snapshot.
            agent: its ``base_url`` is answered inside. None: nothing is.
            limits: of each run.
            readable: further files and folders of this machine that commands may read, as an agent's installation.
            mode: one of the sandbox's. None: the strongest that works here.

        Raises:
            VerifierError: this machine allows no jail, or it did not start.
            NotCopied: the content is larger than ``disk_mb``.
        """
        usable = await asyncio.to_thread(usable_mode) if mode is None else mode
        settings = {"disk_mb": limits.disk_mb, "port": (agent and urlsplit(agent.base_url).port) or 0}
        try:
            jail = await asyncio.to_thread(Jail, usable, settings, readable)
        except OSError as failure:
            raise VerifierError(f"the workspace did not start: {failure}") from failure
        workspace = cls(jail, usable, limits)
        return await workspace.begin(workspace._start(agent), content)

    async def _start(self, agent: RecordedAgent | None) -> None:
        if agent is not None and self._jail.listening is not None:
            await agent.answer_on(self._jail.listening)

    async def execute(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], limits: Limits
    ) -> tuple[Outcome, bytes]:
        processes = limits.processes + (2 if self._mode == "user" else 0)  # the user's: supervisor and init count
        specification = {
            "uid": self._jail.uid,
            "command": list(command),
            "environment": {"PATH": PATHS, **env},
            "stdin": stdin,
            "limits": asdict(limits) | {"processes": processes},
        }
        try:
            report = await supervise(self._jail, specification, limits.wall_s)
        except OSError as failure:
            raise VerifierError(f"the workspace is gone: {type(failure).__name__}: {failure}") from failure
        if report is None:
            raise VerifierError(f"the workspace was killed while {command[0]} ran")
        return as_outcome(report | {"stdout": ""}), base64.b64decode(report["stdout"])

    async def remove(self) -> None:
        await asyncio.to_thread(self._jail.close)
