"""What a role's exit means, and how long a restart waits. Pure."""

from dataclasses import dataclass
from typing import Literal

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher.processes import describe_exit
from pipelinerl.observability.role import EXIT_LEFT, EXIT_REFUSED

MAX_BACKOFF_S = 30.0
ENDS_BY_ITSELF = ("actor", "preprocessor", "finetune")
"""Kinds whose exit 0 means done; everybody else serves until told to stop."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """What a role's exit means."""

    action: Literal["done", "restart", "fail"]
    reason: str = ""


def decide_after_exit(
    kind: str, code: int, kill_reason: str | None, *, training_done: bool, restarts_used: int, limits: LauncherSection
) -> Exit:
    """Decide what follows from an exit that nobody asked for."""
    if code == EXIT_LEFT and kill_reason is None:
        return Exit(action="done", reason="it left the run as it was asked to")
    if code == 0 and kill_reason is None and kind == "actor" and training_done:
        return Exit(action="done")
    if code == 0 and kill_reason is None and kind in ENDS_BY_ITSELF and (training_done or kind == "preprocessor"):
        return Exit(action="done")
    reason = kill_reason or describe_exit(code)
    if code == 0 and kill_reason is None:
        reason = "it ended although the run goes on"
    mendable, spent = code != EXIT_REFUSED, restarts_used >= limits.max_restarts
    if training_done and (kind == "preprocessor" or (kind == "finetune" and (spent or not mendable))):
        # A trainer looks after the servers, but the run can end without.
        return Exit(action="done", reason=f"{reason} after training was done; its work is complete")
    if not mendable:
        return Exit(action="fail", reason=f"{reason}, which a restart cannot mend")
    if spent:
        return Exit(action="fail", reason=f"{reason}, and launcher.max_restarts={limits.max_restarts} is used up")
    return Exit(action="restart", reason=reason)


def backoff_s(restarts: int, base_s: float) -> float:
    """Doubles with every restart of the same role: base, 2·base, … ≤ `MAX_BACKOFF_S`."""
    return min(base_s * 2**restarts, max(base_s, MAX_BACKOFF_S))
