"""When a puller leaves its source, and for which one. Every rate is chosen by hand."""

import math

import pytest

from pipelinerl.weights.transfer.source_choice import BYPASS_S, DEAD_S, Sight, SourceChoice

MB = 1_000_000
END = 100 * MB


def choice(count: int = 4, **settings: float | bool) -> SourceChoice:
    return SourceChoice(count, start=0, end=END, bucket_bytes=MB // 10, **settings)  # type: ignore[arg-type]


class Path:
    """What a puller sees of its sources, each with a rate, ten times a second."""

    def __init__(self, chosen: SourceChoice, rates: list[float], **said: float | bool):
        self.choice, self.rates, self.said = chosen, rates, said
        self.at, self.upto, self.given = 0.0, 0, 0
        self.stood_still_s = 0.0
        """Time that passed while the puller did not look."""
        self.visited = [0]

    def pass_s(self, seconds: float, *, is_ahead: bool = True) -> list[int]:
        """Returns the sources that were in use so far."""
        for _ in range(round(10 * seconds)):
            sight = {"best_rate": 0.0, "pullers": 1, "source_is_limited": False, "held_s": 0.0} | self.said
            is_trainer = self.choice.index == len(self.rates) - 1
            end = END if is_ahead or is_trainer else self.upto
            self.choice.see(
                Sight(at=self.at + self.stood_still_s, upto=self.upto, given=self.given, source_end=end, **sight)
            )
            if self.choice.index != self.visited[-1]:
                self.visited.append(self.choice.index)
            self.at += 0.1
            got = int(self.rates[self.choice.index] * 0.1)
            self.upto += got
            self.given += got * int(sight["pullers"])
        return self.visited


def test_source_whose_link_is_slow_is_left_for_the_next() -> None:
    path = Path(choice(), [1 * MB, 10 * MB, 10 * MB, 10 * MB], best_rate=10.0 * MB)
    assert path.pass_s(3) == [0, 1]


def test_link_of_a_tenth_is_left_when_it_has_lost_a_second() -> None:
    """Compared with half of 10 MB/s, it loses 0.8 s in every second: 0.96 s in 1.2 s, and 1.04 s in 1.3 s."""
    path = Path(choice(), [1 * MB, 10 * MB, 10 * MB, 10 * MB], best_rate=10.0 * MB)
    assert path.pass_s(1.3) == [0]
    assert path.pass_s(0.1) == [0, 1]


def test_link_that_stands_still_for_half_of_every_second_is_kept() -> None:
    """It loses 0.5 s, and wins them back: 5 MB in 0.5 s are those of a second at half the rate."""
    path = Path(choice(), [10 * MB] * 4, best_rate=10.0 * MB)
    for _ in range(9):
        path.pass_s(0.5)
        path.rates = [0.0] * 4
        path.pass_s(0.5)
        path.rates = [10 * MB] * 4
    assert path.visited == [0]


def test_puller_that_stood_still_itself_keeps_its_source() -> None:
    """For three seconds. What the source sent meanwhile comes at once afterwards."""
    path = Path(choice(), [9 * MB] * 4, best_rate=10.0 * MB)
    path.pass_s(1)
    path.stood_still_s = 3.0
    path.pass_s(0.1)
    path.upto += 27 * MB
    path.given += 27 * MB
    assert path.pass_s(3) == [0]


def test_slow_link_is_kept_for_the_last_bytes() -> None:
    """At 1 of 10 MB/s, a last MB takes 1 s instead of 0.1 s: less than a second is saved."""
    path = Path(choice(), [1 * MB] * 4, best_rate=10.0 * MB)
    path.upto = END - 2 * MB
    assert path.pass_s(2) == [0]
    path = Path(choice(), [1 * MB] * 4, best_rate=10.0 * MB)
    path.upto = END - 3 * MB
    assert path.pass_s(2) == [0, 1]


def test_good_source_is_kept_although_a_later_one_has_more() -> None:
    path = Path(choice(), [9 * MB, 1 * MB, 1 * MB, 1 * MB], best_rate=10.0 * MB)
    assert path.pass_s(5) == [0]


def test_source_is_changed_again_if_the_next_is_slow_too() -> None:
    path = Path(choice(), [1 * MB, 1 * MB, 10 * MB, 10 * MB], best_rate=10.0 * MB)
    assert path.pass_s(5) == [0, 1, 2]


def test_slow_taker_tries_every_source_once_and_stays_with_the_best() -> None:
    path = Path(choice(), [1.0 * MB, 1.1 * MB, 1.0 * MB, 0.9 * MB], best_rate=10.0 * MB)
    assert path.pass_s(10) == [0, 1, 2, 3, 1]
    assert path.choice.is_own_limit
    assert path.choice.is_limited


def test_source_that_was_good_and_becomes_slow_is_left() -> None:
    path = Path(choice(), [10 * MB, 10 * MB, 0, 0], best_rate=10.0 * MB)
    assert path.pass_s(3) == [0]
    path.rates[0] = 1 * MB
    assert path.pass_s(3) == [0, 1]
    share, whole_s = path.choice.shares(END)[0]
    assert whole_s > 2 * END / (10 * MB), "the link is judged by what it became"
    assert share == 0.0, "bytes are counted by ``took`` alone"


def test_starved_source_is_kept_while_others_are_nearer_to_the_cause() -> None:
    path = Path(choice(), [1 * MB] * 4, best_rate=10.0 * MB)
    assert path.pass_s(10, is_ahead=False) == [0]


def test_source_at_its_limit_is_bypassed_after_it_had_time_to_mend_it() -> None:
    path = Path(choice(), [1 * MB, 10 * MB, 10 * MB, 10 * MB], best_rate=10.0 * MB, source_is_limited=True)
    assert path.pass_s(BYPASS_S - 0.2, is_ahead=False) == [0]
    assert path.pass_s(1, is_ahead=False) == [0, 1]


@pytest.mark.parametrize(("trainer_rate", "visited"), [(8 * MB, [0, 2]), (1 * MB, [0, 2, 0])])
def test_trainer_is_tried_once_where_nobody_knows_a_faster_server(trainer_rate: int, visited: list[int]) -> None:
    path = Path(choice(3), [1 * MB, 1 * MB, trainer_rate], best_rate=1.0 * MB, source_is_limited=True)
    assert path.pass_s(6, is_ahead=False) == visited


def test_trainer_is_not_tried_if_the_update_takes_as_long_as_before() -> None:
    path = Path(choice(2, expected_s=90.0), [1 * MB, 8 * MB], best_rate=1.0 * MB, source_is_limited=True)
    assert path.pass_s(10, is_ahead=False) == [0]


def test_equal_share_of_an_uplink_is_not_a_slow_link() -> None:
    path = Path(choice(), [3 * MB] * 4, best_rate=9.9 * MB, pullers=3)
    assert path.pass_s(5) == [0]
    assert path.choice.links[0].rate == pytest.approx(9 * MB, rel=0.01)


def test_taker_below_its_share_of_an_uplink_is_limited_by_its_own_link() -> None:
    """Two pullers share 10 MB/s, and this one gets 1 of them."""
    chosen = choice(1)
    for step in range(20):
        chosen.see(
            Sight(
                at=0.1 * step,
                upto=step * MB // 10,
                given=step * MB,
                source_end=END,
                held_s=0.0,
                best_rate=0.0,
                pullers=2,
                source_is_limited=False,
            )
        )
    assert chosen.links[0].rate == pytest.approx(1 * MB, rel=0.01)


def test_bytes_that_were_under_way_for_long_show_a_slow_link_although_the_source_had_no_more() -> None:
    path = Path(choice(), [1 * MB, 10 * MB, 10 * MB, 10 * MB], best_rate=10.0 * MB, held_s=2.0)
    assert path.pass_s(3, is_ahead=False)[:2] == [0, 1]


def test_known_slow_taker_does_not_roam_and_says_that_it_is_the_limit() -> None:
    path = Path(choice(roams=False), [1 * MB, 10 * MB, 10 * MB, 10 * MB], best_rate=10.0 * MB)
    assert path.pass_s(10) == [0]
    assert path.choice.is_own_limit


def test_failed_source_is_followed_by_the_next_in_turn_and_counts_as_dead() -> None:
    chosen = choice(2)
    chosen.die()
    chosen.fail()
    assert chosen.index == 1
    chosen.fail()
    assert chosen.index == 0
    chosen.took(END // 4)
    assert chosen.shares(END) == [(0.25, DEAD_S), (0.0, 0.0)]
    assert chosen.links[1].rate == math.inf


def test_pull_of_no_bytes_has_no_shares() -> None:
    """A worker of a pipeline keeps nothing of some stripes."""
    assert SourceChoice(2, start=5, end=5, bucket_bytes=64).shares(0) == [(0.0, 0.0), (0.0, 0.0)]
