"""The actor's metrics: a sliding window over finished rollouts, and running totals. Callers pass in the time."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelinerl.observability.catalogue import ActorMetric, MetricName
from pipelinerl.records import Rollout

WINDOW = 1024
TOTALS = (
    ActorMetric.ROLLOUTS,
    ActorMetric.GROUPS,
    ActorMetric.GROUPS_RETRIED,
    ActorMetric.ABORTED_REQUESTS,
    ActorMetric.TOKENS_GENERATED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    part: str
    metrics: dict[str, float]
    latency_s: float
    output_tokens: int
    prompt_tokens: int
    num_llm_calls: int
    sent_tokens: int
    cached_tokens: int
    num_unmerged_turns: int
    cut: bool
    num_versions: int


class ActorMetrics:
    """Means over the newest ``window`` rollouts, and sums since the process began. ``now`` is monotonic, in seconds."""

    def __init__(self, now: float, window: int = WINDOW):
        self._recent: deque[_Seen] = deque(maxlen=window)
        self._solved: deque[float] = deque(maxlen=window)
        self._failures: Counter[str] = Counter()
        self._dropped_groups: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._published_before_miss: Counter[str] = Counter()
        self._totals: Counter[MetricName] = Counter()
        self._max_versions = 0
        self._since = (now, 0, 0)
        self._clock, self._generating, self._generating_s = now, False, 0.0

    def generating(self, now: float, is_generating: bool) -> None:
        """Measures the time in which servers have training work. Call it at every turn of the loop."""
        if self._generating:
            self._generating_s += now - self._clock
        self._clock, self._generating = now, is_generating

    def rollouts(self, rollouts: Sequence[Rollout], part: str) -> None:
        """Adds a published group. ``part`` is its domain or data set. If there are several, each also has its means."""
        self._totals[ActorMetric.GROUPS] += 1
        successes = [bool(rollout.metrics["success"]) for rollout in rollouts if "success" in rollout.metrics]
        if successes:
            self._solved.append(sum(successes) / len(successes))
        for rollout in rollouts:
            seen = _see(rollout, part)
            self._recent.append(seen)
            self._totals[ActorMetric.ROLLOUTS] += 1
            self._totals[ActorMetric.TOKENS_GENERATED] += seen.output_tokens
            self._max_versions = max(self._max_versions, seen.num_versions)

    def failure(self, reason: str, server: str = "") -> None:
        """Counts a failed attempt. ``server``: missed the weight probe for it."""
        self._failures[reason] += 1
        if server:
            self._refused[server] += 1

    def published_before_miss(self, server: str, rollouts: int) -> None:
        """Counts published rollouts for which the server then missed its weight probe."""
        self._published_before_miss[server] += rollouts

    def dropped(self, reason: str) -> None:
        """Counts a group that was dropped."""
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
        self._since = (now, totals[ActorMetric.ROLLOUTS], totals[ActorMetric.TOKENS_GENERATED])
        elapsed = max(now - then, 1e-9)
        values: dict[MetricName, float] = {
            **totals,
            ActorMetric.ROLLOUTS_PER_S: (totals[ActorMetric.ROLLOUTS] - rollouts) / elapsed,
            ActorMetric.GENERATING_S: self._generating_s,
            ActorMetric.TOKENS_GENERATED_PER_S: (totals[ActorMetric.TOKENS_GENERATED] - tokens) / elapsed,
            ActorMetric.VERSIONS_IN_ONE_ROLLOUT_MAX: self._max_versions,
        }
        values |= {ActorMetric.FAILURES.of(reason=reason): count for reason, count in self._failures.items()}
        values |= {
            ActorMetric.GROUPS_DROPPED.of(reason=reason): count for reason, count in self._dropped_groups.items()
        }
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
            ActorMetric.CUT_BY_LENGTH: sum(seen.cut for seen in recent) / count,
        }
        values |= _domain_means(recent) | _domain_spread(recent)
        if self._solved:
            values[ActorMetric.GROUPS_ALWAYS_SOLVED] = sum(share == 1.0 for share in self._solved) / len(self._solved)
            values[ActorMetric.GROUPS_NEVER_SOLVED] = sum(share == 0.0 for share in self._solved) / len(self._solved)
        parts = sorted({seen.part for seen in recent})
        for part in parts if len(parts) > 1 else ():
            own = [seen for seen in recent if seen.part == part]
            values[ActorMetric.PART_LATENCY_S.of(part=part)] = sum(seen.latency_s for seen in own) / len(own)
            means = _domain_means(own)
            values |= {ActorMetric.OF_PART.of(part=part, metric=name): value for name, value in means.items()}
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


def _see(rollout: Rollout, part: str) -> _Seen:
    sampled = sum(len(sequence.logprobs) for sequence in rollout.sequences)
    return _Seen(
        part=part,
        metrics=rollout.metrics,
        latency_s=rollout.latency_s,
        output_tokens=sampled,
        prompt_tokens=sum(len(sequence.token_ids) for sequence in rollout.sequences) - sampled,
        num_llm_calls=rollout.num_llm_calls,
        sent_tokens=rollout.sent_tokens,
        cached_tokens=rollout.cached_tokens,
        num_unmerged_turns=rollout.num_unmerged_turns,
        cut=any(sequence.finish_reason == "length" for sequence in rollout.sequences),
        num_versions=len({int(version) for sequence in rollout.sequences for version in sequence.spans[:, 2]}),
    )
