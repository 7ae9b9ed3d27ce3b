"""Which ends of slow links are at fault. Paces are seconds per byte: a healthy link needs 1. A part has 10 bytes."""

from collections.abc import Iterable
from itertools import pairwise

import pytest

from pipelinerl.weights import protocol
from pipelinerl.weights.protocol import Address
from pipelinerl.weights.publish.links import (
    TRAINER,
    Edge,
    End,
    Figure,
    LinkTable,
    Server,
    is_slow,
    slow_ends,
)

PART = 10
Seen = tuple[int, str, str, float, float]
"""Update, giver, taker, pace, and the pace while the giver was ahead."""


def ends(*seen: Seen, best: float = 1.0) -> set[End]:
    figures = {Edge(giver, taker, "x"): Figure(update, PART, pace, ahead) for update, giver, taker, pace, ahead in seen}
    return slow_ends(figures, {"x": best})


def well(update: int, *names: str) -> list[Seen]:
    """A chain in which every link is as fast as the trainer's."""
    return [(update, giver, taker, 1.0, 0.0) for giver, taker in zip((TRAINER, *names), names, strict=False)]


def waiting(update: int, *names: str) -> list[Seen]:
    """Servers behind a slow link: they get ten times less, and their sources are never ahead."""
    return [(update, giver, taker, 10.0, 0.0) for giver, taker in pairwise(names)]


def test_end_of_one_slow_link_may_be_either_and_its_other_links_tell_which() -> None:
    first = [*well(1, "0", "1", "2"), (1, "2", "3", 10.0, 10.0), *waiting(1, "3", "4", "5")]
    assert ends(*first) == {("gives", "2"), ("takes", "3")}
    took_well = (2, "5", "3", 1.0, 1.0)
    assert ends(*first, took_well) == {("gives", "2")}
    had_slow_downlink = (2, "5", "3", 10.0, 10.0)
    assert ends(*first, had_slow_downlink) == {("takes", "3")}
    gave_well = (2, "2", "4", 1.0, 0.0)
    assert ends(*first, gave_well) == {("takes", "3")}


def test_head_of_the_chain_is_at_fault_and_never_the_trainer() -> None:
    assert ends((1, TRAINER, "0", 10.0, 10.0), *waiting(1, "0", "1"), (2, TRAINER, "1", 1.0, 1.0)) == {("takes", "0")}


def test_one_end_explains_several_slow_links() -> None:
    """Server 0 takes slowly, from the trainer and from the end of the next chain. 3 is the end of that one."""
    first = [(1, TRAINER, "0", 6.0, 6.0), *waiting(1, "0", "1", "2", "3")]
    assert ends(*first, *well(2, "1", "2", "3"), (2, "3", "0", 6.0, 6.0)) == {("takes", "0")}


def test_two_faults_are_found_that_mask_each_other() -> None:
    """Of 4 servers 1 takes slowly and 2 gives slowly: 0→1 shows first, then 3 and 0 are late, and 2 gives to one."""
    found = ends((1, "0", "1", 10.0, 10.0), (2, "3", "1", 10.0, 10.0), (2, "2", "0", 4.0, 4.0), (3, "2", "3", 4.0, 4.0))
    assert found == {("takes", "1"), ("gives", "2")}


def test_older_health_says_nothing_about_a_newer_slow_link() -> None:
    assert ends(*well(1, "0", "1", "2", "3"), (2, "2", "3", 10.0, 10.0)) == {("gives", "2"), ("takes", "3")}


def test_links_of_a_kind_that_no_chain_has_shown_say_nothing() -> None:
    figures = {Edge("2", "3", "network over tcp"): Figure(1, PART, 10.0, 10.0)}
    assert slow_ends(figures, {"network over nccl": 1.0}) == set()
    assert slow_ends(figures, {"network over tcp": 1.0}) != set()


@pytest.mark.parametrize(
    ("seconds", "least_s", "expected"), [(19.9, 10, False), (20.1, 10, True), (0.59, 0.1, False), (0.61, 0.1, True)]
)
def test_link_is_slow_at_more_than_twice_the_least_time_and_half_a_second_more(
    seconds: float, least_s: float, expected: bool
) -> None:
    assert is_slow(seconds, least_s) is expected


NODES = {"a0": "a", "a1": "a", "b0": "b", "b1": "b"}
TRAINER_ADDRESS = Address("trainer", 1)


def address(name: str) -> Address:
    return Address(NODES[name], 1 + int(name[1]))


OWNERS = {address(name): Server(name, node) for name, node in NODES.items()}


def seen(
    source: Address, seconds: float, ahead_s: float, num_bytes: int = PART, transport: str = "tcp"
) -> protocol.Link:
    return protocol.Link(
        source=source,
        transport=transport,  # type: ignore[arg-type]
        num_bytes=num_bytes,
        part_bytes=PART,
        seconds=seconds,
        ahead_s=ahead_s,
    )


def record(table: LinkTable, taker: str, links: Iterable[protocol.Link], *, is_chained: bool = True) -> None:
    links = list(links)
    planned = [link.source for link in links]
    table.record(table.update, Server(taker, NODES[taker]), links, OWNERS, planned, is_chained=is_chained)


def chain_of_two_nodes(table: LinkTable, crossing_s: float = 10.0) -> None:
    """a0 → a1 → b0 → b1, of which the trainer feeds the first."""
    table.plan(NODES)
    record(table, "a0", [seen(TRAINER_ADDRESS, 10, 10)])
    record(table, "a1", [seen(address("a0"), 10, 0)])
    record(table, "b0", [seen(address("a1"), crossing_s, crossing_s)])
    record(table, "b1", [seen(address("b0"), crossing_s, 0)])


def test_slow_link_between_nodes_makes_all_servers_of_a_node_slow() -> None:
    table = LinkTable()
    chain_of_two_nodes(table, crossing_s=100.0)
    table.plan(NODES)
    assert (table.slow_uplinks, table.slow_downlinks) == ({"a0", "a1"}, {"b0", "b1"})


def test_network_is_compared_with_the_network_alone() -> None:
    """Within a node bytes are fifty times faster, but they come from the trainer, over the network, as everywhere."""
    table = LinkTable()
    for _ in range(3):
        chain_of_two_nodes(table)
    table.plan(NODES)
    record(table, "b1", [seen(address("b0"), 0.2, 0.2)], is_chained=False)  # a late one, of a server that has all bytes
    table.plan(NODES)
    assert table.slow == frozenset()


def test_late_pulls_over_tcp_are_not_compared_with_chains_over_nccl() -> None:
    table = LinkTable()
    table.plan(NODES)
    record(table, "a0", [seen(TRAINER_ADDRESS, 10, 10, transport="nccl")])
    record(table, "b0", [seen(address("a1"), 100, 100)], is_chained=False)
    table.plan(NODES)
    assert table.slow == frozenset()


def test_late_pull_is_no_measure_for_chains() -> None:
    """From a server that stands idle it may be ten times faster than any chain."""
    table = LinkTable()
    chain_of_two_nodes(table)
    record(table, "b0", [seen(address("a1"), 1, 1)], is_chained=False)
    chain_of_two_nodes(table)
    table.plan(NODES)
    assert table.slow == frozenset()


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "expected"),
    [(2, 1.9, set()), (2, 2.1, {"b0", "b1"}), (3, 1.9, {"b0", "b1"}), (0, 30, set())],
)
def test_figure_counts_from_a_quarter_of_the_part_or_two_seconds_on(
    num_bytes: int, seconds: float, expected: set[str]
) -> None:
    """A healthy link needs a fifth of a second for the ten bytes."""
    table = LinkTable()
    table.plan(NODES)
    record(table, "a0", [seen(TRAINER_ADDRESS, 0.2, 0.2)])
    record(table, "b0", [seen(address("a1"), seconds, seconds, num_bytes)], is_chained=False)
    table.plan(NODES)
    assert table.slow_downlinks == expected


def test_server_is_at_fault_for_a_failure_only_if_whoever_gave_is_not_in_doubt() -> None:
    table = LinkTable()
    chain_of_two_nodes(table)
    table.plan(NODES)
    record(table, "b0", [seen(address("a1"), 100, 100)], is_chained=False)
    assert not table.had_slow_downlink(table.update, Server("b0", "b"))  # nothing newer clears node a
    table.record(
        table.update,
        Server("b1", "b"),
        [seen(Address("c", 1), 100, 100)],
        {Address("c", 1): Server("c0", "c")},
        [],
        is_chained=False,
    )
    assert table.had_slow_downlink(table.update, Server("b0", "b"))


def test_trainer_that_gives_to_late_servers_and_after_others_failed_is_not_judged() -> None:
    """Its uplink belongs to the newest version."""
    table = LinkTable()
    chain_of_two_nodes(table)
    record(table, "b0", [seen(TRAINER_ADDRESS, 100, 100)], is_chained=False)
    links = [seen(address("a1"), 5, 0, 5), seen(TRAINER_ADDRESS, 50, 50, 5)]
    table.record(table.update, Server("b1", "b"), links, OWNERS, [address("a1")], is_chained=True)
    table.plan(NODES)
    assert table.slow == frozenset()


def test_slow_server_is_among_the_others_after_sixteen_updates_at_the_end_of_the_chain() -> None:
    table = LinkTable()
    chain_of_two_nodes(table, crossing_s=100.0)
    for _ in range(16):
        table.plan(NODES)
        record(table, "a0", [seen(TRAINER_ADDRESS, 10, 10)])
    assert table.slow == set(NODES)
    assert table.returned == set()
    table.plan(NODES)
    assert table.slow == set()
    assert table.returned == set(NODES)
    table.plan({"a0": "a"})
    assert table.returned == {"a0"}


def test_pace_of_four_updates_ago_is_the_last_that_counts() -> None:
    """So a head that became slow is found, although all behind it are as slow."""
    table = LinkTable()
    table.plan(NODES)
    record(table, "a0", [seen(TRAINER_ADDRESS, 10, 10)])
    expected = []
    for _ in range(5):
        table.plan(NODES)
        record(table, "a0", [seen(TRAINER_ADDRESS, 100, 100)])
        expected.append(table.expected_s(PART))
    assert expected == [10, 10, 10, 10, 100]


def test_chains_begin_with_three_servers_while_nobody_is_slow() -> None:
    table = LinkTable()
    turns = []
    for _ in range(5):
        table.plan(NODES)
        turns.append(table.turn)
    assert turns == [0, 1, 2, 2, 2]
    three_stripes = LinkTable()
    for _ in range(3):
        three_stripes.plan(NODES, heads=3)
    assert three_stripes.turn == 0


def test_chains_begin_with_three_servers_besides_those_that_take_slowly() -> None:
    """Of node b both servers do, so the chain turns four times, and not for ever."""
    table = LinkTable()
    chain_of_two_nodes(table, crossing_s=100.0)
    turns = []
    for _ in range(7):
        table.plan(NODES)
        turns.append(table.turn)
    assert turns == [1, 2, 3, 4, 4, 4, 4]


def test_late_pull_from_the_trainer_clears_a_server_and_never_accuses_it() -> None:
    """The chain's crossing took 100 s, where the trainer's own link takes 10."""
    table = LinkTable()
    chain_of_two_nodes(table, crossing_s=100.0)
    table.plan(NODES)
    assert table.slow_downlinks == {"b0", "b1"}
    record(table, "b0", [seen(TRAINER_ADDRESS, 100, 100)], is_chained=False)
    table.plan(NODES)
    assert table.slow_downlinks == {"b0", "b1"}
    record(table, "b0", [seen(TRAINER_ADDRESS, 10, 10)], is_chained=False)
    table.plan(NODES)
    assert table.slow_downlinks == set()


def test_servers_are_named_when_they_become_slow_and_when_they_are_well_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = LinkTable()
    chain_of_two_nodes(table, crossing_s=100.0)
    table.plan(NODES)
    assert "event=server_pace server=b0 slow_uplink=False slow_downlink=True" in caplog.messages
    assert len(caplog.messages) == 4
    chain_of_two_nodes(table)
    table.plan(NODES)
    assert "event=server_pace server=b0 slow_uplink=False slow_downlink=False" in caplog.messages
