"""Ends this node's roles in waves, gives trainers time to save, and then ends all remaining processes."""

import logging
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher import reaper
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.losses import ENDS_BY_ITSELF
from pipelinerl.launcher.processes import Host, second_signal, stop_roles
from pipelinerl.observability.status import StatusRecord, read_statuses

log = logging.getLogger(__name__)

LEFTOVER_GRACE_S = 1.0
STORES = ("redis",)
"""Kinds of roles that all other roles need until those have ended."""
HURRY = 0.2
"""Share of `launcher.stop_timeout_s` that later waves get when the run does not end in order."""


@dataclass(frozen=True)
class RoleProcess:
    """A role and its current process."""

    command: RoleCommand
    process: subprocess.Popen[bytes]


class Stopper:
    """Ends all roles of a node.

    Args:
        host: this node's processes.
        limits: section `launcher` of the configuration.
        say: tells the user a line.
    """

    def __init__(self, host: Host, limits: LauncherSection, say: Callable[[str], None]):
        self._host, self._limits, self._say = host, limits, say

    def stop_all(self, roles: list[RoleProcess], *, orderly: bool, may_save: bool, report: Callable[[], None]) -> None:
        """Stop the roles in waves and sweep all remaining processes. Blocks until all have ended.

        Args:
            roles: the roles of this node.
            orderly: whether the run is complete. Roles that work are then stopped before the roles that serve them.
            may_save: whether trainers get longer than the other roles, to save a step. Ranks that cannot reach each
                other cannot save.
            report: called at an orderly end, just before the stores are stopped.
        """
        pids = self._host.all_processes()
        segments = reaper.shared_memory_of(pids)
        reaper.signal_all(pids, signal.SIGCONT)  # a frozen process can neither end nor clean up
        waves = stop_waves({role.command.kind for role in roles}, orderly=orderly)
        late: list[str] = []
        for index, kinds in enumerate(waves):
            if orderly and index == len(waves) - 1:
                report()
            running = {role.command.name: role.process for role in roles if role.command.kind in kinds}
            limit_s = self._limits.stop_timeout_s * (1.0 if index == 0 or orderly else HURRY)
            late += self._stop_wave(running, limit_s, may_save)
        if late:
            log.warning("event=killed reason=did not end in time jobs=%s", ", ".join(late))
        self._host.sweep_all(0 if late else LEFTOVER_GRACE_S, segments)
        for role in roles:
            role.process.wait()

    def _stop_wave(self, running: Mapping[str, subprocess.Popen[bytes]], limit_s: float, may_save: bool) -> list[str]:
        """Ask these roles to end and return those that did not. A trainer with an unsaved step gets time to save it."""
        statuses = read_statuses(self._host.run_dir)
        ranks = {name: self._host.ranks_of(name) for name in running if name.startswith("finetune_")}
        saving = {name for name in running if may_save and name in statuses and is_to_save(name, statuses[name])}
        if saving:
            self._say(
                f"{', '.join(sorted(saving))}: saves its last step, for at most launcher.save_timeout_s="
                f"{self._limits.save_timeout_s:g} s; another Ctrl-C ends at once"
            )
        limits = {n: max(limit_s, self._limits.save_timeout_s) if n in saving else limit_s for n in running}
        with second_signal() as hurried:
            return stop_roles(running, limits, ranks, hurried)


def is_to_save(name: str, status: StatusRecord) -> bool:
    """Return whether a role is a trainer with an optimizer step that is not saved yet."""
    return name.startswith("finetune_") and status.state == "running" and not status.fields.get("saved", True)


def stop_waves(kinds: set[str], *, orderly: bool) -> list[set[str]]:
    """Return the waves of kinds that are stopped together. Stores are always last.

    In an orderly end, roles that work are stopped before the roles that serve them.
    """
    working, stores = kinds & set(ENDS_BY_ITSELF), kinds & set(STORES)
    serving = kinds - working - stores
    return [working, serving, stores] if orderly else [working | serving, stores]
