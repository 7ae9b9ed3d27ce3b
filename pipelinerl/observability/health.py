"""Finds the role that has failed when a run makes no progress: pure decisions over the roles' status files.

A live process can fail in three ways: *silent* (no heartbeat: frozen), *never started* (not ready in time), *stuck*
(heartbeat, but neither progress nor a new wait). A role that waits for another is never stuck itself: the role at the
end of the wait chain is (`wait_chain`), if every role of the chain stands still.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipelinerl.config.sections import LauncherSection
from pipelinerl.observability.status import LAUNCHER, StatusRecord


@dataclass(frozen=True, kw_only=True)
class FailedRole:
    """One role that counts as failed, and why."""

    job: str
    reason: str


def find_failed(
    statuses: Mapping[str, StatusRecord],
    started: Mapping[str, float],
    limits: LauncherSection,
    now: float,
    since: float,
    starved: Mapping[str, float] | None = None,
) -> list[FailedRole]:
    """Return the roles that count as failed now. All times are seconds of one monotonic clock.

    Args:
        statuses: by status name. `finetune_0.rank1` belongs to job `finetune_0`.
        started: start of each running job's process.
        since: start of the launcher's watch without a gap. Older silence is ignored.
        starved: by job, seconds of its silence in which its processes were ready to run but got no CPU.
    """
    failed: dict[str, FailedRole] = {}
    for name, status in statuses.items():
        job = job_of_status(name)
        if job in started and status.state == "running" and job not in failed:
            awake = now - (starved or {}).get(job, 0.0)
            reason = _silent(status, started[job], limits, awake, since) or _slow_start(
                status, started[job], limits, now
            )
            if reason:
                failed[job] = FailedRole(job=job, reason=reason)
    for job, start in started.items():
        if job not in statuses and now - max(start, since) > limits.startup_timeout_s:
            reason = f"gave no sign of life within launcher.startup_timeout_s={limits.startup_timeout_s:g} s"
            failed.setdefault(job, FailedRole(job=job, reason=reason))
    for name in _stuck(statuses, limits, now, since):
        job = job_of_status(name)
        if job in started:
            age = now - stands_since(name, statuses)
            reason = f"no progress for {age:.0f} s (launcher.hang_timeout_s={limits.hang_timeout_s:g})"
            failed.setdefault(job, FailedRole(job=job, reason=reason))
    return list(failed.values())


def job_of_status(status_name: str) -> str:
    return status_name.partition(".")[0]


def _silent(status: StatusRecord, started: float, limits: LauncherSection, now: float, since: float) -> str | None:
    """Why a role counts as silent, or None. Starting roles are exempt: ``startup_timeout_s`` bounds them."""
    silence = now - max(status.heartbeat, since, started)
    if silence <= limits.heartbeat_timeout_s or not status.progress_count:
        return None
    return f"frozen: no heartbeat for {silence:.0f} s (launcher.heartbeat_timeout_s={limits.heartbeat_timeout_s:g})"


def _slow_start(status: StatusRecord, started: float, limits: LauncherSection, now: float) -> str | None:
    if status.progress_count or now - max(started, status.started) <= limits.startup_timeout_s:
        return None
    if status.waits and status.waits[0].on is not None:  # the one that it waits for is judged
        return None
    waits = f", waiting for {status.waits[0].what}" if status.waits else ""
    return f"did not start within launcher.startup_timeout_s={limits.startup_timeout_s:g} s{waits}"


def _stuck(statuses: Mapping[str, StatusRecord], limits: LauncherSection, now: float, since: float) -> set[str]:
    """The ends of the wait chains in which every role has stood still for too long."""
    still = {
        name
        for name in statuses
        if _is_judged(name, statuses) and now - max(stands_since(name, statuses), since) > limits.hang_timeout_s
    }
    chains = [chain for name in still if still.issuperset(chain := wait_chain(name, statuses))]
    return {chain[-1] for chain in chains if not _waits_elsewhere(chain[-1], statuses)}


def _is_judged(name: str, statuses: Mapping[str, StatusRecord]) -> bool:
    """Whether a role may count as stuck: it is ready, or waits for another one.

    A rank without a wait of its own takes part in a computation with the other ranks, so theirs is its wait.
    """
    status = statuses[name]
    if status.state != "running" or not (status.progress_count or waits_for_role(status)):
        return False
    return bool(status.waits) or not any(rank.waits for rank in _ranks(name, statuses))


def stands_since(name: str, statuses: Mapping[str, StatusRecord]) -> float:
    """Time of a role's last progress, or of its wait's beginning or end. Ranks that work move together."""
    status = statuses[name]
    if status.waits:
        return max(status.progress_at, status.waits[0].since)
    return max(max(rank.progress_at, rank.working_since) for rank in _ranks(name, statuses))


def _ranks(name: str, statuses: Mapping[str, StatusRecord]) -> list[StatusRecord]:
    job = job_of_status(name)
    return [status for other, status in statuses.items() if job_of_status(other) == job]


def waits_for_role(status: StatusRecord) -> bool:
    """Whether the role waits for another role."""
    return bool(status.waits) and status.waits[0].on not in (None, LAUNCHER)


def _waits_elsewhere(name: str, statuses: Mapping[str, StatusRecord]) -> bool:
    """Whether a role waits for one without a status: on another node, or not yet started."""
    waits = statuses[name].waits
    return bool(waits) and waits[0].on is not None and not _targets(waits[0].on, statuses)


def wait_chain(name: str, statuses: Mapping[str, StatusRecord]) -> list[str]:
    """Follow the oldest waits from a role to the role that holds it up, in their order.

    A chain with a circle ends with the circle's member whose last progress is oldest.

    >>> wait_chain("actor_0", statuses)
    ['actor_0', 'finetune_0', 'preprocessor_0']
    """
    chain = [name]
    while True:
        status = statuses[chain[-1]]
        on = status.waits[0].on if status.waits else None
        targets = _targets(on, statuses)
        if not targets:
            return chain
        nearest = min(targets, key=lambda target: statuses[target].progress_at)
        if nearest in chain:
            circle = chain[chain.index(nearest) :]
            chain.append(min(circle, key=lambda member: (statuses[member].progress_at, member)))
            return chain
        chain.append(nearest)


def _targets(on: str | None, statuses: Mapping[str, StatusRecord]) -> list[str]:
    """Names of the statuses that a wait refers to, by job or by kind."""
    if on is None:
        return []
    if on in statuses:
        return [on]
    return [name for name in statuses if name.rpartition("_")[0] == on]
