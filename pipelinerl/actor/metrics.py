"""The actor's metrics, and how they are reported: to the trackers, as a line of progress in the log, in its status."""

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipelinerl.actor.messages import Sampling
from pipelinerl.observability.catalogue import ActorMetric, MetricName, is_clear, unclear_metrics
from pipelinerl.observability.metrics import MetricsLogger
from pipelinerl.observability.status import BLOCKED_AT, CurrentWait, RoleStatus
from pipelinerl.records import EvaluationDone, Rollout

log = logging.getLogger(__name__)

WINDOW = 1024
"""Newest rollouts that the means are taken over: four optimizer batches of the default size."""
TOTALS = (
    ActorMetric.ROLLOUTS,
    ActorMetric.GROUPS,
    ActorMetric.GROUPS_RETRIED,
    ActorMetric.ABORTED_REQUESTS,
    ActorMetric.TOKENS_GENERATED,
    ActorMetric.ANSWERS_FROM_JOURNAL,
    ActorMetric.DIVERGED,
)


NOTHING = Sampling(tokens=0, longest=0, ended=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    subset: str
    metrics: dict[str, float]
    latency_s: float
    output_tokens: int
    prompt_tokens: int
    num_llm_calls: int
    sent_tokens: int
    cached_tokens: int
    num_unmerged_turns: int
    num_forks: int
    num_compacted: int
    cut: bool
    num_versions: int


class ActorMetrics:
    """Means over the newest `WINDOW` rollouts, and sums since the process began. ``now`` is monotonic, in seconds."""

    def __init__(self, now: float):
        self._recent: deque[_Seen] = deque(maxlen=WINDOW)
        self._left_out: set[str] = set()
        self._solved: deque[float] = deque(maxlen=WINDOW)
        self._failures: Counter[str] = Counter()
        self._dropped_groups: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._published_before_miss: Counter[str] = Counter()
        self._totals: Counter[MetricName] = Counter()
        self._max_versions = 0
        self._since = (now, 0, 0)
        self._sampling: dict[int, Sampling] = {}
        self._sampled = self._ended = 0
        self._blocked_s: defaultdict[str, float] = defaultdict(float)
        self.blocked_at: dict[str, str] = {}
        """Domain that has blocked the event loop of a worker → where it did so last."""
        self._clock, self._generating, self._generating_s = now, False, 0.0
        self._share_held = self._held_s = 0.0

    def generating(self, now: float, is_generating: bool, share_held: float = 0.0) -> None:
        """Measures the time in which servers have training work. Call it at every turn of the loop.

        Args:
            share_held: of the servers' room for rollouts, what the bound on the lag keeps empty.
        """
        if self._generating:
            self._generating_s += now - self._clock
        self._held_s += self._share_held * (now - self._clock)
        self._clock, self._generating, self._share_held = now, is_generating, share_held

    def rollouts(self, rollouts: Sequence[Rollout], subset: str) -> None:
        """Adds a published group. ``subset``: its domain or data set. If there are several, each also has its means."""
        self._totals[ActorMetric.GROUPS] += 1
        successes = [bool(rollout.metrics["success"]) for rollout in rollouts if "success" in rollout.metrics]
        if successes:
            self._solved.append(sum(successes) / len(successes))
        for rollout in rollouts:
            seen = _see(rollout, subset)
            left_out = rollout.metrics.keys() - seen.metrics.keys()
            if reason := unclear_metrics(left_out - self._left_out):
                log.warning("event=domain_metric_left_out note=%s", reason)
                self._left_out |= left_out
            self._recent.append(seen)
            self._totals[ActorMetric.ROLLOUTS] += 1
            self._totals[ActorMetric.TOKENS_GENERATED] += seen.output_tokens
            self._totals[ActorMetric.ANSWERS_FROM_JOURNAL] += rollout.answers_from_journal
            self._totals[ActorMetric.DIVERGED] += rollout.diverged
            self._max_versions = max(self._max_versions, seen.num_versions)

    def sampling(self, worker: int, now: Sampling) -> None:
        """Adds a worker's report about its answers. A worker that was replaced counts from zero again."""
        before = self._sampling.get(worker, NOTHING)
        self._sampled += now.tokens - (before.tokens if now.tokens >= before.tokens else 0)
        self._ended += now.ended - (before.ended if now.ended >= before.ended else 0)
        for domain, blocked in now.blocked.items():
            earlier = before.blocked[domain].seconds if domain in before.blocked else 0.0
            self._blocked_s[domain] += blocked.seconds - (earlier if blocked.seconds >= earlier else 0.0)
            if blocked.seconds != earlier:
                self.blocked_at[domain] = blocked.where
        self._sampling[worker] = now

    def failure(self, reason: str, server: str = "") -> None:
        """Counts a failed attempt. ``server``: missed the weight probe for it."""
        self._failures[reason] += 1
        if server:
            self._refused[server] += 1

    def published_before_miss(self, server: str, rollouts: int) -> None:
        """Counts published rollouts for which the server then missed its weight probe."""
        self._published_before_miss[server] += rollouts

    def dropped(self, reason: str) -> None:
        self._dropped_groups[reason] += 1

    def aborted(self, requests: int) -> None:
        """Counts requests that a server did not complete."""
        self._totals[ActorMetric.ABORTED_REQUESTS] += requests

    def retried(self) -> None:
        """Counts a group whose missing attempts are tried again."""
        self._totals[ActorMetric.GROUPS_RETRIED] += 1

    def snapshot(self, now: float) -> dict[MetricName, float]:
        """Returns all metrics. Rates cover the time since the previous snapshot."""
        then, rollouts, tokens = self._since
        totals: dict[MetricName, int] = {name: self._totals[name] for name in TOTALS}
        sampled = max(tokens, self._sampled, totals[ActorMetric.TOKENS_GENERATED])
        self._since = (now, totals[ActorMetric.ROLLOUTS], sampled)
        elapsed = max(now - then, 1e-9)
        values: dict[MetricName, float] = {
            **totals,
            ActorMetric.ROLLOUTS_PER_S: (totals[ActorMetric.ROLLOUTS] - rollouts) / elapsed,
            ActorMetric.GENERATING_S: self._generating_s,
            ActorMetric.SLOTS_HELD: self._held_s / elapsed,
            ActorMetric.WORKERS_BUSY: sum(each.busy for each in self._sampling.values()) / max(1, len(self._sampling)),
            ActorMetric.TOKENS_GENERATED_PER_S: (sampled - tokens) / elapsed,
            ActorMetric.ROLLOUTS_ENDED: self._ended,
            ActorMetric.LONGEST_UNDER_WAY: max((each.longest for each in self._sampling.values()), default=0),
            ActorMetric.VERSIONS_IN_ONE_ROLLOUT_MAX: self._max_versions,
        }
        self._held_s = 0.0
        values |= {ActorMetric.FAILURES.of(reason=reason): count for reason, count in self._failures.items()}
        values |= {
            ActorMetric.GROUPS_DROPPED.of(reason=reason): count for reason, count in self._dropped_groups.items()
        }
        values |= {ActorMetric.LOOP_BLOCKED_S.of(domain=domain): s for domain, s in self._blocked_s.items()}
        values |= {ActorMetric.REFUSED.of(server=server): count for server, count in self._refused.items()}
        values |= {
            ActorMetric.PUBLISHED_BEFORE_MISS.of(server=server): count
            for server, count in self._published_before_miss.items()
        }
        return values | self._means()

    def _means(self) -> dict[MetricName, float]:
        recent = self._recent
        if not recent:
            return {}
        count = len(recent)
        values: dict[MetricName, float] = {
            ActorMetric.LATENCY_S: sum(seen.latency_s for seen in recent) / count,
            ActorMetric.OUTPUT_TOKENS: sum(seen.output_tokens for seen in recent) / count,
            ActorMetric.OUTPUT_TOKENS_MAX: max(seen.output_tokens for seen in recent),
            ActorMetric.PROMPT_TOKENS: sum(seen.prompt_tokens for seen in recent) / count,
            ActorMetric.LLM_CALLS: sum(seen.num_llm_calls for seen in recent) / count,
            ActorMetric.PREFIX_HIT_RATE: sum(seen.cached_tokens for seen in recent)
            / max(1, sum(seen.sent_tokens for seen in recent)),
            ActorMetric.UNMERGED_TURNS: sum(seen.num_unmerged_turns for seen in recent) / count,
            ActorMetric.FORKS: sum(seen.num_forks for seen in recent) / count,
            ActorMetric.COMPACTED: sum(seen.num_compacted for seen in recent) / count,
            ActorMetric.CUT_BY_LENGTH: sum(seen.cut for seen in recent) / count,
        }
        values |= _domain_spread(recent) | _domain_means(recent)
        if self._solved:
            values[ActorMetric.GROUPS_ALWAYS_SOLVED] = sum(share == 1.0 for share in self._solved) / len(self._solved)
            values[ActorMetric.GROUPS_NEVER_SOLVED] = sum(share == 0.0 for share in self._solved) / len(self._solved)
        subsets = sorted({seen.subset for seen in recent})
        for subset in subsets if len(subsets) > 1 else ():
            own = [seen for seen in recent if seen.subset == subset]
            values[ActorMetric.SUBSET_LATENCY_S.of(subset=subset)] = sum(seen.latency_s for seen in own) / len(own)
            means = _domain_means(own)
            values |= {ActorMetric.OF_SUBSET.of(subset=subset, metric=name): value for name, value in means.items()}
        return values


def _domain_means(seen: Iterable[_Seen]) -> dict[MetricName, float]:
    """Returns the mean of every metric of the domains, over the rollouts that have it."""
    return {ActorMetric.OF_DOMAIN.of(metric=name): sum(values) / len(values) for name, values in _given(seen).items()}


def _domain_spread(seen: Iterable[_Seen]) -> dict[MetricName, float]:
    """Returns minimum, maximum and standard deviation of every metric of the domains."""
    spread: dict[MetricName, float] = {}
    for name, values in _given(seen).items():
        mean = sum(values) / len(values)
        spread[ActorMetric.OF_DOMAIN_MIN.of(metric=name)] = min(values)
        spread[ActorMetric.OF_DOMAIN_MAX.of(metric=name)] = max(values)
        spread[ActorMetric.OF_DOMAIN_STD.of(metric=name)] = (
            sum((value - mean) ** 2 for value in values) / len(values)
        ) ** 0.5
    return spread


def _given(seen: Iterable[_Seen]) -> dict[str, list[float]]:
    """Returns the values of every metric of the domains."""
    given: dict[str, list[float]] = {}
    for one in seen:
        for name, value in one.metrics.items():
            given.setdefault(name, []).append(value)
    return given


def _see(rollout: Rollout, subset: str) -> _Seen:
    return _Seen(
        subset=subset,
        metrics={name: value for name, value in rollout.metrics.items() if is_clear(name)},
        latency_s=rollout.latency_s,
        output_tokens=rollout.num_sampled,
        prompt_tokens=sum(len(sequence.token_ids) for sequence in rollout.sequences) - rollout.num_sampled,
        num_llm_calls=rollout.num_llm_calls,
        sent_tokens=rollout.sent_tokens,
        cached_tokens=rollout.cached_tokens,
        num_unmerged_turns=rollout.num_unmerged_turns,
        num_forks=rollout.num_forks,
        num_compacted=rollout.num_compacted,
        cut=any(sequence.has_cut for sequence in rollout.sequences),
        num_versions=len(rollout.versions),
    )


SHOWN = (
    ActorMetric.ROLLOUTS,
    ActorMetric.ROLLOUTS_PER_S,
    ActorMetric.TOKENS_GENERATED_PER_S,
    ActorMetric.REWARD,
    ActorMetric.SUCCESS,
    ActorMetric.ROLLOUTS_UNDER_WAY,
)


class Reporter:
    """Writes metrics every ``every_s`` seconds and shows what the actor waits for."""

    def __init__(self, metrics: ActorMetrics, metrics_log: MetricsLogger, status: RoleStatus, every_s: float):
        self._metrics, self._metrics_log, self._status, self._every_s = metrics, metrics_log, status, every_s
        self._next = time.monotonic() + every_s
        self._wait = CurrentWait(status)
        self._noted: dict[str, str] = {}

    def progress(self, **fields: Any) -> None:
        """Shows fields in the role's status."""
        self._status.progress(**fields)

    def wait_for(self, what: str, on: str) -> None:
        """Shows the current wait: ``what``, and the job that it is ``on``. Does nothing if it is unchanged."""
        self._wait.be(what, on)

    def stop_waiting(self) -> None:
        self._wait.end()

    def log(self, numbers: Callable[[], dict[MetricName, float]], step: int, *, force: bool = False) -> None:
        """Writes the metrics and the progress line if they are due, or always with ``force``.

        Args:
            numbers: returns further metrics.
            step: live weight version.
        """
        if self._noted != self._metrics.blocked_at:
            self._noted = dict(self._metrics.blocked_at)
            self._status.note(**{BLOCKED_AT: self._noted})
        now = time.monotonic()
        if now < self._next and not force:
            return
        self._next = now + self._every_s
        values = self._metrics.snapshot(now) | numbers()
        self._metrics_log.log(values, step=step)
        log.info("event=progress %s", " ".join(f"{key}={_short(values[key])}" for key in SHOWN if key in values))

    def evaluation(self, done: EvaluationDone) -> None:
        self._metrics_log.log(evaluation_metrics(done), step=done.version)


def evaluation_metrics(done: EvaluationDone) -> dict[MetricName, float]:
    """An evaluation's metrics: over all its rollouts, and of each data set."""
    values: dict[MetricName, float] = {}
    if done.success is not None and done.reward is not None:
        values |= {ActorMetric.EVAL_SUCCESS: done.success, ActorMetric.EVAL_REWARD: done.reward}
    for name, value in done.metrics.items():
        dataset, slash, metric = name.rpartition("/")
        of_dataset = ActorMetric.EVAL_OF_DATASET.of(dataset=dataset, metric=metric)
        values[of_dataset if slash else ActorMetric.EVAL_COMPLETE] = value
    return values


def _short(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) else f"{value:.3f}"
