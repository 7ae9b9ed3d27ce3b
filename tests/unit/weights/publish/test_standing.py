"""Which end of a slow link is at fault, and when a server counts as well again."""

import math

import pytest

from pipelinerl.weights.protocol import Address, Link
from pipelinerl.weights.publish.standing import (
    LinkVerdict,
    Report,
    Standing,
    UsualRate,
    healthy_s,
    is_slow,
    is_well,
    judge_links,
)

SERVERS = {Address(name, 1): name for name in "abcd"}


def link(source: str, whole_s: float, share: float = 1.0) -> Link:
    return Link(source=Address(source, 1), share=share, whole_s=whole_s)


def report(server: str, seconds: float, *links: Link) -> Report:
    return Report(server=server, seconds=seconds, links=links)


@pytest.mark.parametrize(
    ("seconds", "fastest_s", "expected"), [(4.1, 2, True), (3.9, 2, False), (0.55, 0.1, False), (0.65, 0.1, True)]
)
def test_slow_is_twice_and_half_a_second_more(seconds: float, fastest_s: float, expected: bool) -> None:
    assert is_slow(seconds, fastest_s) is expected


@pytest.mark.parametrize(
    ("seconds", "fastest_s", "expected"), [(2.9, 2, True), (3.1, 2, False), (0.55, 0.1, True), (0.65, 0.1, False)]
)
def test_well_is_half_as_much_again_or_half_a_second_more(seconds: float, fastest_s: float, expected: bool) -> None:
    assert is_well(seconds, fastest_s) is expected


def test_two_slow_takers_that_share_an_uplink_are_not_cleared_by_it() -> None:
    """Each of a quarter of the rate: together they take half of what the link could carry."""
    reports = [report("a", 2, link("trainer", 2)), report("b", 8, link("a", 4)), report("c", 8, link("a", 4))]
    verdict = judge_links(reports, SERVERS, {"b": Standing(takes_slowly=True), "c": Standing(takes_slowly=True)})
    assert verdict.takes_well == {"a"}
    assert verdict.takes_slowly | verdict.gives_slowly == set()


def test_healthy_seconds_are_those_of_the_best_link_although_all_had_to_wait() -> None:
    assert healthy_s([report("a", 9, link("trainer", 3)), report("b", 20)]) == 3
    assert healthy_s([]) == 0


def test_source_that_was_left_for_a_faster_one_gives_slowly() -> None:
    verdict = judge_links(
        [report("a", 2, link("trainer", 2)), report("b", 3, link("a", 20, 0.1), link("trainer", 2, 0.9))], SERVERS
    )
    assert verdict.gives_slowly == {"a"}
    assert verdict.takes_slowly == set()
    assert {"a", "b"} <= verdict.takes_well


def test_taker_whose_source_fed_another_well_takes_slowly() -> None:
    verdict = judge_links(
        [report("a", 2, link("trainer", 2)), report("c", 3, link("a", 2, 0.9)), report("b", 20, link("a", 20))], SERVERS
    )
    assert (verdict.gives_slowly, verdict.takes_slowly) == (set(), {"b"})


def test_both_ends_of_a_slow_link_are_slow_as_long_as_nothing_clears_one() -> None:
    verdict = judge_links([report("a", 2, link("trainer", 2)), report("b", 20, link("a", 20))], SERVERS)
    assert (verdict.gives_slowly, verdict.takes_slowly) == ({"a"}, {"b"})


def test_slow_taker_that_is_known_puts_no_blame_on_its_source() -> None:
    reports = [report("a", 2, link("trainer", 2)), report("b", 20, link("a", 20))]
    verdict = judge_links(reports, SERVERS, {"b": Standing(takes_slowly=True)})
    assert (verdict.gives_slowly, verdict.takes_slowly) == (set(), {"b"})


def test_taker_that_was_slow_from_a_source_that_gives_well_puts_no_blame_on_another() -> None:
    reports = [
        report("a", 2, link("trainer", 2)),
        report("b", 2.1, link("a", 0.0)),
        report("c", 8, link("b", 8, 0.5), link("a", 8, 0.5)),
    ]
    verdict = judge_links(reports, SERVERS)
    assert (verdict.gives_slowly, verdict.takes_slowly) == (set(), {"c"})


def test_taker_answers_for_a_slow_link_to_the_trainer() -> None:
    verdict = judge_links([report("a", 20, link("trainer", 20)), report("b", 2, link("trainer", 2))], SERVERS)
    assert (verdict.gives_slowly, verdict.takes_slowly) == (set(), {"a"})


def test_servers_that_waited_for_others_are_not_judged() -> None:
    verdict = judge_links([report("a", 2, link("trainer", 2)), report("c", 20, link("b", 0.0))], SERVERS)
    assert "c" not in verdict.takes_slowly | verdict.takes_well
    assert "b" not in verdict.gives_slowly | verdict.gives_well


def test_standing_keeps_what_an_update_did_not_measure_and_takes_what_it_did() -> None:
    standing = Standing(gives_slowly=True, takes_slowly=True)
    standing.judge("a", 1, LinkVerdict(takes_well=frozenset("a")))
    assert (standing.gives_slowly, standing.takes_slowly) == (True, False)


def test_late_report_of_an_older_version_does_not_undo_what_a_newer_one_showed() -> None:
    standing, one = Standing(), frozenset("a")
    older = LinkVerdict(takes_slowly=one, gives_slowly=one, limits={"a": 4.0})
    standing.judge("a", 1, older)
    standing.judge("a", 2, LinkVerdict(takes_well=one, limits={"a": 1.0}))
    standing.judge("a", 1, older)
    assert (standing.gives_slowly, standing.takes_slowly, standing.limit) == (True, False, 1.0)
    standing.judge("a", 1, LinkVerdict(gives_well=one))
    assert not standing.gives_slowly, "of its uplink that version is still the newest"


def test_server_is_well_again_after_a_fast_gauge_and_after_two_the_second_time() -> None:
    standing, slow = Standing(), LinkVerdict(gives_slowly=frozenset("a"))
    standing.judge("a", 1, slow)
    standing.gauge("a", 1, 20, 2)
    assert standing.is_slow
    standing.gauge("a", 2, 2, 2)
    assert not standing.is_slow
    standing.judge("a", 3, slow)
    standing.gauge("a", 4, 2, 2)
    assert standing.is_slow
    standing.gauge("a", 5, 2, 2)
    assert not standing.is_slow


@pytest.mark.parametrize("late", [1, 2])
def test_late_report_does_not_undo_what_the_gauge_showed(late: int) -> None:
    """The gauge was after the update to version 2, and a server of the chain of version 1 or 2 ended later."""
    standing, slow = Standing(), LinkVerdict(gives_slowly=frozenset("a"))
    standing.judge("a", 1, slow)
    standing.gauge("a", 2, 2, 2)
    standing.judge("a", late, slow)
    assert not standing.gives_slowly
    standing.judge("a", 3, slow)
    assert standing.gives_slowly, "the update to the next version measured it again"


def test_late_failure_of_an_older_version_does_not_undo_what_a_newer_one_showed() -> None:
    standing = Standing()
    standing.judge("a", 2, LinkVerdict(takes_well=frozenset("a"), limits={"a": 1.0}))
    standing.fail("a", 1)
    assert (standing.takes_slowly, standing.limit) == (False, 1.0)
    standing.fail("a", 3)
    standing.judge("a", 2, LinkVerdict(takes_well=frozenset("a"), limits={"a": 1.0}))
    assert (standing.takes_slowly, standing.limit) == (True, math.inf), "nor does an older success undo a failure"


def test_limit_is_that_of_its_own_links_and_zero_for_who_waited_for_others() -> None:
    """`a` has 2 s. `b` would need 8 s over one of its links and 12 s over the other, `c` waits for it."""
    reports = [
        report("a", 2, link("trainer", 2)),
        report("b", 10, link("a", 12, 0.5), link("trainer", 8, 0.5)),
        report("c", 10, link("b", 0.0)),
        report("d", 8, Link(source=Address("a", 1), share=1.0, whole_s=8.0, is_shared=True)),
    ]
    verdict = judge_links(reports, SERVERS)
    assert verdict.limits == {"a": 1.0, "b": 4.0, "c": 0.0, "d": 0.0}
    standing = Standing(takes_slowly=True, limit=3.0)
    standing.judge("b", 1, LinkVerdict())
    assert standing.limit == 3.0, "it is not in this update"
    standing.judge("b", 1, verdict)
    assert standing.limit == 4.0


def test_server_that_failed_by_its_own_link_takes_slowly() -> None:
    standing = Standing()
    standing.fail("a", 1)
    assert (standing.takes_slowly, standing.limit) == (True, math.inf)


def test_puller_is_compared_with_earlier_updates_where_all_wait_for_it() -> None:
    """The first of the chain takes 8 s, so all others do. In the update before, one had 2 s."""
    address = Address("a", 1)
    reports = [
        Report(server="a", seconds=8.0, links=(Link(source=Address("trainer", 1), share=1.0, whole_s=8.0),)),
        Report(server="b", seconds=8.1, links=(Link(source=address, share=1.0, whole_s=0.0),)),
    ]
    usual = UsualRate()
    assert usual.seconds(100) == 0.0
    usual.record(1, 100, [Report(server="b", seconds=2.0, links=())])
    usual.record(2, 100, reports)
    assert usual.seconds(50) == 1.0
    assert judge_links(reports, {address: "a"}).takes_slowly == frozenset()
    assert judge_links(reports, {address: "a"}, usual_s=usual.seconds(100)).takes_slowly == {"a"}
    for version in range(3, 6):
        usual.record(version, 100, reports)
    assert usual.seconds(100) == 8.0


@pytest.mark.parametrize(("is_shared", "takes_well"), [(False, {"a", "b"}), (True, {"b"})])
def test_equal_share_of_an_uplink_does_not_clear_a_puller(is_shared: bool, takes_well: set[str]) -> None:
    link = Link(source=Address("b", 1), share=1.0, whole_s=2.0, is_shared=is_shared)
    reports = [Report(server="b", seconds=2.0, links=()), Report(server="a", seconds=8.0, links=(link,))]
    verdict = judge_links(reports, {Address("b", 1): "b"})
    assert (verdict.takes_well, verdict.gives_well) == (takes_well, {"b"})
