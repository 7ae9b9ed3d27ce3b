"""The end of a run's roles in waves: which end together, how long each wave gets, and who may save first."""

from collections.abc import Callable, Collection

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher.losses import ENDS_BY_ITSELF
from pipelinerl.observability.status import StatusRecord

LEFTOVER_GRACE_S = 1.0
"""From SIGTERM to SIGKILL for processes that an ended role leaves, such as Python's resource tracker."""
STORES = ("redis",)
"""Kinds of roles that all other roles need until those have ended."""
HURRY = 0.2
"""Share of `launcher.stop_timeout_s` for later waves when the run does not end in order: only stores are left then."""


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


def is_to_save(name: str, status: StatusRecord) -> bool:
    """Return whether a role is a trainer with an optimizer step that is not saved yet."""
    return name.startswith("finetune_") and status.state == "running" and not status.fields.get("saved", True)
