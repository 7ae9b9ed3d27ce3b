"""Which domain is next when several are mixed, so that what is trained meets their weights. Pure.

Dispatch goes to the domain that is furthest behind, counting what is under way. A finished group waits for its turn
while a domain that is further behind has groups under way: publication follows the order of dispatch over the domains,
however long each one's rollouts take, so waiting costs nothing of the lag bound. What is dropped anywhere does not
count, and is made up for; but a domain of which everything is dropped must not hold up the others.
"""

from collections.abc import Collection, Sequence

MAX_COMPENSATION = 4
"""A domain whose groups are dropped gets at most this many times its weight's share of the rollouts."""


def furthest_behind(weights: Sequence[float], counts: Sequence[float], among: Collection[int]) -> int:
    """Index of the domain of ``among`` whose count falls short of its weight's share of all counts by most.

    Example:
        >>> furthest_behind([0.6, 0.3, 0.1], [16, 8, 0], among={0, 1, 2})
        2
    """
    total_weight, total = sum(weights), sum(counts)
    return max(among, key=lambda i: (total * weights[i] / total_weight - counts[i], weights[i], -i))


def counted(*, settled: int, published: int, dropped_later: int) -> float:
    """What a domain has contributed, in samples.

    Args:
        settled: attempts of its groups that were published or dropped.
        published: samples of it on topic `actor`.
        dropped_later: those of them that the preprocessor dropped.
    """
    return max(published - dropped_later, settled / MAX_COMPENSATION)
