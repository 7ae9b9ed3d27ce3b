"""The interface of an engine, which starts, watches and ends the roles' processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.losses import NodeLost


@dataclass(frozen=True, kw_only=True)
class RoleExit:
    """How a role's process ended."""

    code: int
    """Exit code. Below 0 it is minus the number of the signal that killed the process."""
    kill_reason: str | None = None
    """Why the engine killed the process itself. None if it did not."""


class RoleEngine(Protocol):
    """Runs the processes of roles."""

    def start(self, command: RoleCommand) -> None:
        """Start the role, or start it again. Call from the main thread only."""
        ...

    async def exit_of(self, name: str) -> RoleExit | NodeLost:
        """Wait for the end of a role that was started, when no process of it is left, or for the loss of its node."""
        ...

    async def watch(self) -> None:
        """End the processes of roles that hang or are frozen, until cancelled."""
        ...

    def stop_all(self, *, orderly: bool, may_save: bool, report: Callable[[], None]) -> None:
        """End all roles and block until they have ended.

        Args:
            orderly: end working roles before the roles that serve them, and call ``report`` before the stores end.
            may_save: give trainers time to save a step that is not saved.
        """
        ...
