"""Choosing a domain: the shares follow the weights within one group, and drops count as if they had not been."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.actor.pacing import counted, furthest_behind


def test_furthest_behind_takes_the_domains_in_the_order_of_their_shortfall() -> None:
    order, counts = "", [0, 0, 0]
    for _ in range(10):
        index = furthest_behind([0.6, 0.3, 0.1], counts, range(3))
        counts[index] += 8
        order += "abc"[index]
    assert order == "abacabaaba"
    assert counts == [48, 24, 8]


@given(st.lists(st.integers(1, 100), min_size=2, max_size=5), st.integers(1, 400))
def test_furthest_behind_of_five_domains_none_is_ever_two_groups_from_its_share(
    weights: list[int], groups: int
) -> None:
    counts = [0] * len(weights)
    for number in range(1, groups + 1):
        counts[furthest_behind(weights, counts, range(len(weights)))] += 1
        shares = [weight / sum(weights) * number for weight in weights]
        assert max(abs(count - share) for count, share in zip(counts, shares, strict=True)) < 2


def test_furthest_behind_chooses_among_those_it_may() -> None:
    assert furthest_behind([0.6, 0.3, 0.1], [60, 0, 10], among={0, 2}) == 2


@pytest.mark.parametrize(
    ("resolved", "published", "dropped_later", "expected"),
    [(80, 80, 0, 80), (80, 64, 8, 56), (80, 8, 8, 20), (0, 0, 0, 0)],
)
def test_counted_drops_do_not_count_but_no_more_than_fourfold(resolved, published, dropped_later, expected) -> None:
    assert counted(resolved=resolved, published=published, dropped_later=dropped_later) == expected
