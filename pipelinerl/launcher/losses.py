"""What the loss of a process, a node or the leader means for the run: one event in, one decision out. Pure.

A contract test compares it with the table in docs/cluster.md row by row.
"""

import signal
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.launcher.processes import describe_exit
from pipelinerl.membership.joining import JOINING
from pipelinerl.membership.lease import EndKind
from pipelinerl.membership.role import EXIT_DISK_FULL, EXIT_FAILED, EXIT_LEFT
from pipelinerl.world.placement import SERVER_KINDS

MAX_BACKOFF_S = 30.0
"""A port, memory of the last process or a mount is free within this time, or not by waiting."""
ENDS_BY_ITSELF = ("actor", "preprocessor", "finetune")
"""Kinds whose exit code 0 means done. All other kinds serve until the launcher stops them."""
FIXED = ("redis", "verifier", "environment")
"""Kinds that other roles find at the address of the world map only, so that they cannot move."""
LEAVES_ALONE = ("SIGTERM", "SIGHUP")
"""By these signals a node whose roles may all be missing leaves the others running. Ctrl-C ends the run everywhere."""

Departure = Literal["refused", "failed", "lost", "stopped", "done"]
"""How the launcher of a node ended. `lost`: its lease ran out."""


@dataclass(frozen=True, kw_only=True)
class ProcessLost:
    """A role's process ended and the launcher did not ask for it."""

    kind: str
    code: int
    """Exit code. Below 0 it is minus the number of the signal that killed the process."""
    kill_reason: str | None = None
    """Why the launcher killed the process itself. None if it did not."""
    is_training_done: bool = False
    is_standalone: bool = False
    """Roles run without the rest (`debug.mode`), so that each ends by itself when its work is done."""
    restarts_used: int
    """By all roles of this supervisor so far."""
    max_restarts: int


@dataclass(frozen=True, kw_only=True)
class NodeLost:
    """A node has left the run."""

    name: str
    how: Departure = "lost"
    reason: str = "is lost"
    """For a stop the name of the signal. For a lost node the rest of a sentence that begins with its name."""
    kinds: Collection[str]
    """Kinds of its roles."""
    elsewhere: Collection[str]
    """Kinds of the other nodes' roles."""
    is_placed_again: bool = False
    """Whether a platform finds another place for the roles."""


@dataclass(frozen=True, kw_only=True)
class LeaderLost:
    """The launcher that this one follows has stopped leading it."""

    name: str
    how: Departure = "lost"
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeasesAway:
    """This launcher cannot read the leases of the others."""

    leader: str
    """Name of the node that leads."""
    place: str
    """Where the leases are."""
    away_s: float
    limit_s: float


Loss = ProcessLost | NodeLost | LeaderLost | LeasesAway


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The consequence of a loss, and its reason."""

    action: Literal["continue", "wait", "restart", "move", "end"]
    """The run goes on without what is lost, waits for it, starts it again here or elsewhere, or ends."""
    reason: str = ""
    ending: EndKind = "failed"
    """How the run ends. Only for the action `end`."""
    is_cut_off: bool = False
    """Whether the run ends because a node is lost, perhaps with trainer ranks that others need to save."""
    is_spent: bool = False
    """Whether the run ends because the restarts are used up, so that the first failure is its cause."""

    @property
    def exit_code(self) -> int:
        """The launcher's exit code if the run ends."""
        return exit_code_of(self.ending, self.reason)


def exit_code_of(ending: EndKind, reason: str) -> int:
    """Return the launcher's exit code. For a stopped run ``reason`` is the name of the signal."""
    match ending:
        case "done":
            return 0
        case "stopped":
            return 128 + signal.Signals[reason].value
        case "failed":
            return EXIT_FAILED


def decide(loss: Loss) -> Decision:
    """Decide what follows from a loss."""
    match loss:
        case ProcessLost():
            return _after_process(loss)
        case NodeLost():
            return _after_node(loss)
        case LeaderLost():
            return _end_with(loss.name, loss.how, loss.reason)
        case LeasesAway():
            is_over = loss.away_s >= loss.limit_s
            reason = f"is lost: the leases in {loss.place} could not be read for {loss.limit_s:g} s"
            return Decision(
                action="end" if is_over else "wait",
                reason=f"{loss.leader} {reason} (launcher.node_timeout_s)",
                is_cut_off=is_over,
            )


def _after_process(loss: ProcessLost) -> Decision:
    if loss.code == EXIT_LEFT and loss.kill_reason is None and loss.kind in SERVER_KINDS:  # no other can be asked
        return Decision(action="continue", reason="it left the run on request")
    if loss.code == EXIT_DISK_FULL and loss.kill_reason is None:
        return Decision(action="wait", reason="no space is left where it writes")
    ended_itself = loss.code == 0 and loss.kill_reason is None
    may_end = loss.is_training_done or loss.is_standalone or loss.kind == "preprocessor"
    if ended_itself and loss.kind in ENDS_BY_ITSELF and may_end:
        return Decision(action="continue")
    reason = "it ended before the run did" if ended_itself else loss.kill_reason or describe_exit(loss.code)
    cannot_mend, is_spent = loss.code == EXIT_REFUSED, loss.restarts_used >= loss.max_restarts
    is_trainer_over = loss.kind == "finetune" and (cannot_mend or is_spent)
    if loss.is_training_done and (loss.kind == "preprocessor" or is_trainer_over):
        # After its last step the trainer only looks after the servers, and the run can end without that.
        return Decision(action="continue", reason=f"{reason} after training was done; its work is complete")
    if cannot_mend:
        return Decision(action="end", reason=f"{reason}, which a restart cannot mend")
    if is_spent:
        reason = f"{reason}, and launcher.max_restarts={loss.max_restarts} is used up"
        return Decision(action="end", reason=reason, is_spent=True)
    return Decision(action="restart", reason=reason)


def _after_node(loss: NodeLost) -> Decision:
    fixed = sorted(set(loss.kinds) & set(FIXED))
    if loss.is_placed_again and not fixed:
        return Decision(action="move", reason=f"{loss.name} {loss.reason}")
    leaves = loss.how in ("failed", "lost") or (loss.how == "stopped" and loss.reason in LEAVES_ALONE)
    if leaves and may_be_missing(loss.kinds, loss.elsewhere):
        why = loss.reason if loss.how == "lost" else f"has {loss.how}: {loss.reason}"
        return Decision(action="continue", reason=f"{loss.name} {why}")
    only = f", and other roles know its {' and '.join(fixed)} by that address only" if loss.is_placed_again else ""
    decision = _end_with(loss.name, loss.how, loss.reason + only)
    return replace(decision, is_cut_off=decision.is_cut_off and "finetune" in loss.kinds)


def may_be_missing(kinds: Collection[str], elsewhere: Collection[str]) -> bool:
    """Whether the run goes on while roles of these kinds are missing, because they can join it again."""
    # Clients find verifiers by the world map, so another node must have one.
    return all(kind in JOINING and (kind != "verifier" or kind in elsewhere) for kind in kinds)


def _end_with(name: str, how: Departure, reason: str) -> Decision:
    match how:
        case "done":
            return Decision(action="end", ending="done")
        case "stopped":
            return Decision(action="end", ending="stopped", reason=reason)
        case "refused":
            return Decision(action="end", reason=reason)
        case "failed":
            return Decision(action="end", reason=f"{name}: {reason}")
        case "lost":
            return Decision(action="end", reason=f"{name} {reason}", is_cut_off=True)


def restart_delay_s(restarts: int, base_s: float) -> float:
    """Seconds before the next restart of a role: base, 2·base, 4·base, … ≤ `MAX_BACKOFF_S`."""
    return min(base_s * 2**restarts, max(base_s, MAX_BACKOFF_S))
