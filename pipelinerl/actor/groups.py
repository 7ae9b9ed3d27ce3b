"""Training groups from dispatch to publication.

A group starts for the domain that is furthest behind its weight. A complete group is published when no domain that is
further behind has running groups (``pacing``) and its servers were verified (``publish_gate``).
"""

import json
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.actor.drops import DropListener
from pipelinerl.actor.messages import Failure, GroupFinished, StartGroup, describe_value
from pipelinerl.actor.metrics import ActorMetrics
from pipelinerl.actor.pacing import Pacing, counted, furthest_behind
from pipelinerl.actor.problems import Place
from pipelinerl.actor.progress import ActorProgress, TopicJournal
from pipelinerl.actor.publish_gate import newest_used
from pipelinerl.actor.work import Work, WorkTable
from pipelinerl.errors import RecordTooLarge
from pipelinerl.observability import spans
from pipelinerl.observability.catalogue import ActorMetric, MetricName
from pipelinerl.records import GroupDropped, ProbeMissed, Rollout, RolloutGroup
from pipelinerl.records.drops import DropReason
from pipelinerl.records.rollouts import PROBLEM_CHARS

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainDomain:
    """A domain's training problems."""

    name: str
    weight: float
    problems: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """The configuration's settings for groups."""

    attempts: int
    max_failed_rollouts: int
    max_reissues: int


@dataclass(eq=False, kw_only=True)
class TrainingGroup(Work):
    """A running group."""

    place: Place
    dispatch_index: int
    began: int = field(default_factory=time.time_ns)
    """Time of the dispatch, Unix time in ns."""
    rollouts: list[Rollout] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    """Failures since its attempts were last started."""
    refused: Counter[str] = field(default_factory=Counter)
    """Server → rollouts that are not used, because it missed the weight probe for them."""
    judged: bool = False
    """Whether its domain judges it as a whole, so that its rollouts are made together."""
    reissues: int = 0
    finished: float = 0.0
    """When its last rollout ended, monotonic seconds."""
    used: dict[str, int] = field(default_factory=dict)
    """``newest_used`` of its rollouts, when it is complete."""


class TrainingGroups:
    """The training groups of this actor. Used by one thread."""

    def __init__(
        self,
        *,
        domains: Sequence[TrainDomain],
        rules: GroupRules,
        pacing: Pacing,
        progress: ActorProgress,
        journal: TopicJournal,
        drops: DropListener,
        table: WorkTable,
        metrics: ActorMetrics,
    ):
        self._domains, self._rules, self._pacing = domains, rules, pacing
        self._progress, self._journal, self._drops = progress, journal, drops
        self._table, self._metrics = table, metrics
        self._under_way: Counter[int] = Counter()
        self._held: list[deque[TrainingGroup]] = [deque() for _ in domains]

    @property
    def holds_groups(self) -> bool:
        """Whether complete groups wait for a domain that is behind its weight, or for a weight probe."""
        return any(self._held)

    @property
    def awaits_check(self) -> bool:
        """Whether complete groups wait for a weight probe."""
        now = time.monotonic()
        return any(self._waits(group, now) for groups in self._held for group in groups)

    @property
    def published(self) -> int:
        """Samples published."""
        return self._progress.published

    def fill(self, version: int) -> None:
        """Starts as many groups as there is room for."""
        while self.may_start(version):
            self._start(version)

    def may_start(self, version: int) -> bool:
        """Whether servers and the pacing rule have room for another group."""
        return self._table.has_room(self._rules.attempts) and self._is_paced(version)

    def share_held(self, version: int) -> float:
        """Share of the rollouts that servers and `max_lag_steps` have room for, which wait for a newer version."""
        dispatched, dropped = self._progress.expected_units, self._drops.room()
        holds = self._pacing.holds(dispatched=dispatched, dropped=dropped, version=version)
        if not holds or not self._table.has_room(self._rules.attempts):
            return 0.0
        return self._table.share_free(self._pacing.most_running / self._progress.units_per_rollout)

    def handle_ended(self, group: Work, ended: GroupFinished) -> None:
        """Holds a complete group for its turn, retries its missing attempts, or drops it and records the reason."""
        assert isinstance(group, TrainingGroup)
        group.rollouts.extend(ended.rollouts)
        group.failed.extend(ended.failures)
        group.judged |= ended.judged
        self._sort_in(group)

    def refuse(self, misses: Sequence[ProbeMissed]) -> list[Failure]:
        """Takes back finished rollouts whose servers missed the probe, as failures. Published ones are only counted."""
        for miss in misses:
            if published := self._table.gate.count_published(miss.server, miss.since):
                self._metrics.published_before_miss(miss.server, published)
                log.error(
                    "event=published_before_probe_missed server=%s since=%d rollouts=%d",
                    *(miss.server, miss.since, published),
                )
        failed: list[Failure] = []
        for group in (*self._table.all_of(TrainingGroup), *(group for held in self._held for group in held)):
            group.rollouts, refused = self._table.misses.sort(group.rollouts)
            group.failed += refused
            failed += refused
            if refused and group in self._held[group.start.domain]:
                self._held[group.start.domain].remove(group)
                self._sort_in(group)
        return failed

    def _sort_in(self, group: TrainingGroup) -> None:
        failed, group.failed = group.failed, []
        group.refused.update(failure.server for failure in failed if failure.server)
        if self._rules.attempts - len(group.rollouts) <= self._rules.max_failed_rollouts and group.rollouts:
            group.finished, group.used = time.monotonic(), newest_used(group.rollouts)
            self._held[group.start.domain].append(group)
            return
        worst = next((f for f in failed if not f.reason.repeats), failed[0])
        if worst.reason.repeats and group.reissues < self._rules.max_reissues:
            self._metrics.retried()
            group.reissues += 1
            if group.judged:  # the others get their answers from the journal: not sampling, but judging is repeated
                group.rollouts = []
                group.narrow(tuple(range(self._rules.attempts)))
            else:
                group.narrow(tuple(sorted(failure.attempt for failure in failed)))
            is_first = group.reissues == 1
            anew = [failure.attempt for failure in failed if not (is_first and failure.reason.keeps_answers)]
            self._journal.forget_answers(group.start.group_id, anew)
            self._table.submit(group)
            return
        self._drop(group, worst)

    def publish_in_turn(self) -> bool:
        """Publishes complete groups until a domain that is further behind has running ones. Returns whether it did."""
        now = time.monotonic()
        ready = [deque(group for group in held if not self._waits(group, now)) for held in self._held]
        published: set[TrainingGroup] = set()
        while sum(map(len, self._held)) > len(published):
            under_way = [i for i, samples in self._under_way.items() if samples]
            index = furthest_behind([domain.weight for domain in self._domains], self._counted(), under_way)
            if not ready[index]:
                break
            group = ready[index].popleft()
            published.add(group)
            self._publish(group)
        if published:
            self._held = [deque(group for group in held if group not in published) for held in self._held]
        return bool(published)

    def give_up(self) -> None:
        """Cancels all groups, because training is done and they would not be trained."""
        self._table.cancel(TrainingGroup)
        self._held = [deque() for _ in self._domains]

    def numbers(self) -> dict[MetricName, float]:
        """Counts for the metrics."""
        progress, domains = self._progress, self._domains
        values: dict[MetricName, float] = {
            ActorMetric.SAMPLES_DISPATCHED: progress.dispatched,
            ActorMetric.SAMPLES_PUBLISHED: progress.published,
            ActorMetric.SAMPLES_DROPPED: progress.dropped + self._drops.total(),
            ActorMetric.GROUPS_HELD: sum(map(len, self._held)),
            ActorMetric.EPOCH: max((source.epoch for source in progress.sources.values()), default=0),
        }
        if len(domains) > 1:
            dropped = self._drops.by_domain()
            kept = {domain.name: progress.by_domain[domain.name] - dropped.get(domain.name, 0) for domain in domains}
            values |= {
                ActorMetric.MIX.of(domain=name): samples / max(1, sum(kept.values())) for name, samples in kept.items()
            }
        if removed := sum(len(source.removed) for source in progress.sources.values()):
            values[ActorMetric.PROBLEMS_REMOVED] = removed
        samplers = [source.sampler for source in progress.sources.values() if source.sampler is not None]
        if samplers:
            values[ActorMetric.PROBLEMS_TRIED] = sum(sampler.problems_tried for sampler in samplers)
            values[ActorMetric.POOL_SIZE] = sum(sampler.pool_size for sampler in samplers)
        return values

    def _waits(self, group: TrainingGroup, now: float) -> bool:
        return self._table.gate.holds(group.used, finished=group.finished, now=now)

    def _is_paced(self, version: int) -> bool:
        dispatched, dropped = self._progress.expected_units, self._drops.room()
        if not self._progress.is_rollout_size_known and dispatched >= self._pacing.batch_size:
            return False
        return self._pacing.may_start(dispatched=dispatched, dropped=dropped, version=version)

    def _start(self, version: int) -> None:
        counts = [count + self._under_way[i] for i, count in enumerate(self._counted())]
        index = furthest_behind([domain.weight for domain in self._domains], counts, range(len(counts)))
        domain = self._domains[index]
        place = self._progress.sources[domain.name].next_problem()
        if self._progress.epoch_began:
            self._journal.save()
        prefix = f"{domain.name}-" if len(self._domains) > 1 else ""
        start = StartGroup(
            group_id=f"{prefix}{place.epoch}-{place.position}",
            domain=index,
            problem=domain.problems[place.problem_index],
            attempts=tuple(range(self._rules.attempts)),
            evaluation=False,
            version=version,
        )
        self._under_way[index] += self._rules.attempts
        dispatch_index = self._progress.dispatch(self._rules.attempts)
        self._table.submit(TrainingGroup(start=start, place=place, dispatch_index=dispatch_index))

    def _counted(self) -> list[float]:
        """Returns each domain's contribution in samples (see ``pacing.counted``)."""
        progress, dropped = self._progress, self._drops.by_domain()
        return [
            counted(
                resolved=progress.resolved_by_domain[domain.name],
                published=progress.by_domain[domain.name],
                dropped_later=dropped.get(domain.name, 0),
            )
            for domain in self._domains
        ]

    def _publish(self, group: TrainingGroup) -> None:
        rollouts = tuple(sorted(group.rollouts, key=lambda rollout: rollout.attempt))
        try:
            self._write_outcome(
                group,
                RolloutGroup(
                    **self._identity(group),
                    rollouts=rollouts,
                    dispatched_version=group.start.version,
                    problem=problem_text(group.start.problem),
                ),
            )
        except RecordTooLarge as error:
            self._drop(group, Failure(attempt=0, reason=DropReason.TOO_LARGE, detail=str(error)))
            return
        self._table.gate.published(rollouts)
        spans.record("group", group.start.group_id, group.began, root=True, rollouts=len(rollouts))
        domain = self._domains[group.start.domain].name
        self._metrics.rollouts(rollouts, domain if len(self._domains) > 1 else dataset_of(group.start.problem))

    def _drop(self, group: TrainingGroup, failure: Failure) -> None:
        self._write_outcome(group, GroupDropped(**self._identity(group), reason=failure.reason, detail=failure.detail))
        self._metrics.dropped(failure.reason)
        log.warning(
            "event=group_dropped id=%s reason=%s detail=%s", group.start.group_id, failure.reason, failure.detail
        )

    def _write_outcome(self, group: TrainingGroup, record: RolloutGroup | GroupDropped) -> None:
        self._journal.publish(record)
        self._under_way[group.start.domain] -= self._rules.attempts

    def _identity(self, group: TrainingGroup) -> dict[str, Any]:
        return {
            "group_id": group.start.group_id,
            "epoch": group.place.epoch,
            "position": group.place.position,
            "problem_index": group.place.problem_index,
            "actor": self._pacing.actor,
            "domain": self._domains[group.start.domain].name,
            "dataset": dataset_of(group.start.problem),
            "attempts": self._rules.attempts,
            "settled_before": self._progress.before,
            "dispatch_index": group.dispatch_index,
            "refused": dict(group.refused),
            "epoch_size": self._progress.sources[self._domains[group.start.domain].name].size_of(group.place.epoch),
        }


def problem_text(problem: Mapping[str, Any]) -> str:
    """Returns the problem as JSON for readers, cut to ``PROBLEM_CHARS``."""
    return json.dumps(problem, ensure_ascii=False, default=describe_value)[:PROBLEM_CHARS]


def dataset_of(problem: Mapping[str, Any]) -> str:
    """Returns the data set that a training problem names, or "train"."""
    return str(problem.get("dataset", "train"))
