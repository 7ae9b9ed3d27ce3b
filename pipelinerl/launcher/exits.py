"""Decides what follows from a role's exit, and how long a restart waits. Pure functions."""

from dataclasses import dataclass
from typing import Literal

from pipelinerl.config.sections import LauncherSection
from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.launcher.processes import describe_exit
from pipelinerl.observability.role import EXIT_LEFT

MAX_BACKOFF_S = 30.0
ENDS_BY_ITSELF = ("actor", "preprocessor", "finetune")
"""Kinds whose exit code 0 means done. All other kinds serve until the launcher stops them."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """What the supervisor does after a role's exit, and why."""

    action: Literal["done", "restart", "fail"]
    reason: str = ""


def decide_after_exit(
    kind: str,
    code: int,
    kill_reason: str | None,
    *,
    training_done: bool,
    restarts_used: int,
    limits: LauncherSection,
    alone: bool = False,
) -> Exit:
    """Decide what follows from an exit that the launcher did not ask for.

    Args:
        alone: the roles run without the rest (`debug.mode`), so that each ends by itself when its work is done.
        code: exit code. Below 0 it is minus the number of the signal that killed the process.
        kill_reason: why the launcher killed the process itself. None if it did not.
        restarts_used: restarts of all roles of this node so far.
    """
    if code == EXIT_LEFT and kill_reason is None:
        return Exit(action="done", reason="it left the run as it was asked to")
    may_end = training_done or alone or kind == "preprocessor"
    if code == 0 and kill_reason is None and kind in ENDS_BY_ITSELF and may_end:
        return Exit(action="done")
    reason = kill_reason or describe_exit(code)
    if code == 0 and kill_reason is None:
        reason = "it ended before the run did"
    mendable, spent = code != EXIT_REFUSED, restarts_used >= limits.max_restarts
    if training_done and (kind == "preprocessor" or (kind == "finetune" and (spent or not mendable))):
        # After its last step the trainer only looks after the servers, and the run can end without that.
        return Exit(action="done", reason=f"{reason} after training was done; its work is complete")
    if not mendable:
        return Exit(action="fail", reason=f"{reason}, which a restart cannot mend")
    if spent:
        return Exit(action="fail", reason=f"{reason}, and launcher.max_restarts={limits.max_restarts} is used up")
    return Exit(action="restart", reason=reason)


def restart_delay_s(restarts: int, base_s: float) -> float:
    """Seconds before the next restart of a role: base, 2·base, 4·base, … ≤ `MAX_BACKOFF_S`."""
    return min(base_s * 2**restarts, max(base_s, MAX_BACKOFF_S))
