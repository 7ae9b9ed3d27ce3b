"""The interface of an engine, which starts, watches and ends the roles' processes, and the waves of their end."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.losses import ENDS_BY_ITSELF, NodeLost

LEFTOVER_GRACE_S = 1.0
"""From SIGTERM to SIGKILL for processes that an ended role leaves, such as Python's resource tracker."""
STORES = ("redis",)
"""Kinds of roles that all other roles need until those have ended."""
HURRY = 0.2
"""Share of `launcher.stop_timeout_s` for later waves when the run does not end in order: only stores are left then."""


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


def stop_in_waves(
    kinds: Collection[str],
    stop_wave: Callable[[Collection[str], float], None],
    limits: LauncherSection,
    *,
    orderly: bool,
    report: Callable[[], None],
) -> None:
    """Stop the roles of these kinds, stores last. Blocks until all have ended.

    Args:
        stop_wave: ends the roles of the given kinds within the given seconds.
        orderly: whether the run is complete. Roles that work are then stopped before the roles that serve them.
        report: called at an orderly end, just before the stores are stopped.
    """
    working, stores = set(kinds) & set(ENDS_BY_ITSELF), set(kinds) & set(STORES)
    serving = set(kinds) - working - stores
    if not orderly:
        stop_wave(working | serving, limits.stop_timeout_s)
        stop_wave(stores, HURRY * limits.stop_timeout_s)
        return
    stop_wave(working, limits.stop_timeout_s)
    stop_wave(serving, limits.stop_timeout_s)
    report()
    stop_wave(stores, limits.stop_timeout_s)
