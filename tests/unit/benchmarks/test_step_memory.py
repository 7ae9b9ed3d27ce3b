"""Peaks of memory from what the profiler saw of it."""

import pytest

from benchmarks.step_memory_rank import peaks_of

SPANS = {"first": (0, 9), "second": (10, 20)}


def test_a_phase_has_the_peak_of_its_own_time() -> None:
    blocks = [(12, 100, 5), (1, 0, 40), (13, 100, -5), (2, 50, 30), (5, 0, -40), (15, 0, 2)]
    assert peaks_of(SPANS, blocks) == {"first": 70, "second": 35}


@pytest.mark.parametrize(("address", "held"), [(100, 20), (95, 20), (105, 10)])
def test_a_block_whose_release_was_not_seen_ends_where_its_memory_is_used_again(address: int, held: int) -> None:
    """Gloo's threads release what a collective used."""
    assert peaks_of(SPANS, [(1, 100, 10), (2, 110, 10), (3, address, 10), (11, 300, 1)])["second"] == held + 1


def test_a_release_of_a_block_from_before_the_profile_takes_nothing_away() -> None:
    assert peaks_of(SPANS, [(1, 100, 10), (2, 500, -80), (11, 300, 1)]) == {"first": 10, "second": 11}
