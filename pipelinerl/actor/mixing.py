"""Chooses the next domain when several are mixed, so that the trained samples match the domains' weights. Pure.

The next group is dispatched for the domain that is furthest behind its weight, with running groups counted. A finished
group waits to be published while a domain that is further behind has running groups. Publication therefore follows the
order of dispatch over the domains, however long their rollouts take, and waiting costs nothing of the lag bound.

Dropped samples do not count, so the domain gets more rollouts to replace them. This compensation is limited, because a
domain whose samples are all dropped must not hold up the others.
"""

from collections.abc import Collection, Sequence

MAX_COMPENSATION = 4
"""A domain whose groups are dropped gets at most this many times its weight's share of the rollouts."""


def furthest_behind(weights: Sequence[float], counts: Sequence[float], among: Collection[int]) -> int:
    """Returns the index of the domain whose count falls furthest short of its weight's share of all counts.

    Args:
        weights: of all domains.
        counts: samples of all domains.
        among: indices of the domains to choose from.

    Example:
        >>> furthest_behind([0.6, 0.3, 0.1], [16, 8, 0], among={0, 1, 2})
        2
    """
    total_weight, total = sum(weights), sum(counts)
    return max(among, key=lambda i: (total * weights[i] / total_weight - counts[i], weights[i], -i))


def counted(*, settled: int, published: int, dropped_later: int) -> float:
    """Returns a domain's contribution in samples.

    Args:
        settled: attempts of its groups that were published or dropped.
        published: its samples on topic `actor`.
        dropped_later: published samples that the preprocessor dropped.
    """
    return max(published - dropped_later, settled / MAX_COMPENSATION)
