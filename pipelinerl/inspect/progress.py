"""Says what servers generate while nothing has been trained: pure functions over metrics and statuses."""

from collections.abc import Mapping

from pipelinerl.inspect.report import number
from pipelinerl.observability.catalogue import ActorMetric
from pipelinerl.observability.metrics import Point
from pipelinerl.observability.status import BLOCKED_AT, StatusRecord

NAMED_SERVERS = 4
"""More servers would not fit into the live line: it then has their number."""


def first_answers(metrics: Point, statuses: Mapping[str, StatusRecord]) -> list[str]:
    """Describe the first answers and who samples them.

    `first answers: 12 of 64, longest 2,100 tokens`, `340 tok/s`, `on actor_llm_0 (30), actor_llm_1 (22)`. If the actor
    reports less: the number of rollouts that it has published.
    """
    ended, under_way = metrics.get(ActorMetric.ROLLOUTS_ENDED), metrics.get(ActorMetric.ROLLOUTS_UNDER_WAY)
    if ended is None or under_way is None:
        return [f"{number(metrics.get(ActorMetric.ROLLOUTS), 0)} rollouts"]
    first = ", ".join([f"first answers: {ended:.0f} of {ended + under_way:.0f}", *longest_answer(metrics)])
    speed = f"{number(metrics.get(ActorMetric.TOKENS_GENERATED_PER_S), 0)} tok/s"
    return [first, speed, *_servers(statuses)]


def longest_answer(metrics: Point) -> list[str]:
    """`longest 2,100 tokens` of the answers under way. Empty if none is long enough to be known."""
    longest = metrics.get(ActorMetric.LONGEST_UNDER_WAY)
    return [f"longest {number(longest, 0)} tokens"] if longest else []


def blocked_loop_lines(metrics: Point, statuses: Mapping[str, StatusRecord]) -> list[str]:
    """Say which domains block event loops and where, a line for each.

    `blocked   domain math has blocked the event loops of its rollout workers for 24 s, last at sums.py:12 in score`.
    """
    places = blocked_places(statuses)
    return [
        f"blocked   domain {domain} has blocked the event loops of its rollout workers for {seconds:.0f} s"
        f"{last_at(places, domain)}: run what blocks in a thread (event=loop_blocked in actor_*/log.txt)"
        for domain, seconds in sorted(ActorMetric.LOOP_BLOCKED_S.found(metrics).items())
    ]


def blocked_places(statuses: Mapping[str, StatusRecord]) -> dict[str, str]:
    """Return the domains that blocked the event loop of a rollout worker, with the line that did so last."""
    places: dict[str, str] = {}
    for status in statuses.values():
        places |= status.fields.get(BLOCKED_AT) or {}
    return places


def last_at(places: Mapping[str, str], domain: str) -> str:
    return f", last at {places[domain]}" if domain in places else ""


def _servers(statuses: Mapping[str, StatusRecord]) -> list[str]:
    """Which servers have how many requests."""
    asked = {
        name: int(status.fields["requests"])
        for name, status in sorted(statuses.items())
        if name.startswith("actor_llm_") and status.state == "running" and status.fields.get("requests")
    }
    if len(asked) > NAMED_SERVERS:
        return [f"{sum(asked.values())} requests on {len(asked)} servers"]
    return ["on " + ", ".join(f"{name} ({requests})" for name, requests in asked.items())] if asked else []
