"""From which servers each one pulls a version."""

from collections.abc import Iterable
from itertools import permutations
from typing import Any, cast

import pytest

from pipelinerl.membership.lease import Lease
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import Address, ParamSpec
from pipelinerl.weights.publish.dispatch import chained, in_order, late
from pipelinerl.weights.publish.links import LinkTable
from pipelinerl.weights.publish.servers import ServerClient
from pipelinerl.weights.publish.versions import Dispatch, PendingVersion

TRAINER = Address("trainer", 1)


def servers(*nodes: str) -> list[ServerClient]:
    """Servers ``s0 …`` on these nodes."""
    made = []
    for number, node in enumerate(nodes):
        lease = Lease(name=f"actor_llm_{number}", incarnation="a", ttl_s=10, url=f"http://{node}:{8000 + number}")
        client = ServerClient(lease.as_job(), cast(Any, None))
        client.workers, client.is_up = (Address(node, 9000 + number),), True
        made.append(client)
    return made


def on_own_nodes(count: int) -> list[ServerClient]:
    return servers(*(f"s{number}" for number in range(count)))


def pending_version(base_version: int | None = None) -> PendingVersion:
    deltas = None if base_version is None else ((0, 64),)
    return PendingVersion(1, Layout((ParamSpec("w", "uint8", (1024,)),)), ((0, 1024),), base_version, deltas)


def sources(dispatch: Dispatch) -> list[str]:
    return [address.host for address in dispatch.route[0][0].sources]


def planned(clients: list[ServerClient], links: LinkTable | None = None) -> dict[str, list[str]]:
    """The sources of each server in a chain."""
    links = links or LinkTable()
    dispatches = chained(pending_version(), in_order(clients, links.turn), links, [TRAINER], 64)
    return {dispatch.client.name: sources(dispatch) for dispatch in dispatches}


def waits(pending: PendingVersion, ready: Iterable[ServerClient], holders: Iterable[ServerClient], **how: Any) -> bool:
    return not late(pending, ready, holders, LinkTable(), [TRAINER], 64, **how)


def late_sources(
    pending: PendingVersion, client: ServerClient, holders: list[ServerClient], links: LinkTable | None = None
) -> list[str]:
    (dispatch,) = late(pending, [client], holders, links or LinkTable(), [TRAINER], 64)
    return sources(dispatch)


@pytest.mark.parametrize(("turn", "head"), [(0, 0), (1, 4), (2, 8)])
def test_chain_of_servers_that_are_known_by_their_leases_enters_every_other_node_once(turn: int, head: int) -> None:
    """A lease does not say the node. Server n runs on node n mod 3. Every turn begins a node and a server further."""
    links = LinkTable()
    links.turn = turn
    clients = servers(*(f"node{number % 3}" for number in range(9)))
    found = planned(clients, links)
    nodes = {client.name: client.node for client in clients}
    assert sum(before[0] not in (TRAINER.host, nodes[name]) for name, before in found.items()) == 2
    assert [name for name, before in found.items() if before[0] == TRAINER.host] == [f"actor_llm_{head}"]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_nobody_pulls_from_slow_and_failed_servers_in_whatever_order_they_come(order: tuple[int, ...]) -> None:
    clients, links = on_own_nodes(4), LinkTable()
    links.slow_uplinks, links.slow_downlinks = frozenset({"actor_llm_0"}), frozenset({"actor_llm_3"})
    clients[1].is_suspect = True
    found = planned([clients[number] for number in order], links)
    assert found == {"actor_llm_2": ["trainer"], "actor_llm_0": ["s2", "trainer"]}


def test_one_server_that_gives_slowly_is_the_end_of_the_chain_and_others_are_late() -> None:
    links = LinkTable()
    links.slow_uplinks = frozenset({"actor_llm_0", "actor_llm_1"})
    found = planned(on_own_nodes(4), links)
    assert {name: before[0] for name, before in found.items()} == {
        "actor_llm_2": "trainer",
        "actor_llm_3": "s2",
        "actor_llm_0": "s3",
    }


def test_others_keep_their_neighbours_when_a_server_becomes_late() -> None:
    links = LinkTable()
    links.turn, links.slow_downlinks = 1, frozenset({"actor_llm_0"})
    found = planned(on_own_nodes(4), links)
    assert {name: before[0] for name, before in found.items()} == {
        "actor_llm_1": "trainer",
        "actor_llm_2": "s1",
        "actor_llm_3": "s2",
    }


def test_if_nobody_is_well_all_get_the_version_in_a_chain() -> None:
    clients, links = on_own_nodes(2), LinkTable()
    links.slow_downlinks = frozenset({"actor_llm_0"})
    clients[1].is_suspect = True
    assert planned(clients, links) == {"actor_llm_0": ["trainer"], "actor_llm_1": ["s0", "trainer"]}


def test_server_that_was_slow_returns_at_the_end_of_the_chain() -> None:
    links = LinkTable()
    links.returned = {"actor_llm_0"}
    links.turn = 1
    found = planned(on_own_nodes(4), links)
    assert [found[f"actor_llm_{number}"][0] for number in range(4)] == ["s3", "trainer", "s1", "s2"]


def test_late_server_waits_for_one_that_has_the_version() -> None:
    *chain, waiting = on_own_nodes(4)
    pending = pending_version()
    pending.pulls = {one.client.name: one for one in chained(pending, chain, LinkTable(), [TRAINER], 64)}
    assert waits(pending, [waiting], [])
    pending.end(chain[0].name, is_served=True)
    assert waits(pending, [waiting], [chain[0]])  # the next one pulls from it
    pending.end(chain[2].name, is_served=True)
    assert late_sources(pending, waiting, [chain[0], chain[2]]) == ["s2", "trainer"]


def test_late_servers_pull_from_one_each_and_from_nobody_who_is_slow_to_send() -> None:
    first, second, *ready = on_own_nodes(5)
    links = LinkTable()
    links.slow_uplinks = frozenset({second.name})
    dispatches = late(pending_version(), ready, [first, second], links, [TRAINER], 64)
    assert [sources(one) for one in dispatches] == [["s0", "trainer"], ["trainer"]]


def test_server_that_is_furthest_behind_is_the_first_of_the_late_ones() -> None:
    holder, newer, older, out_of_service = on_own_nodes(4)
    newer.serves, older.serves = 7, 3
    for ready, first in (([newer, older], older), ([newer, older, out_of_service], out_of_service)):
        dispatches = late(pending_version(), ready, [holder], LinkTable(), [TRAINER], 64)
        assert dispatches[0].client is first


def test_late_servers_of_a_node_get_the_version_from_elsewhere_once() -> None:
    here, there, first, second = servers("a", "c", "b", "b")
    pending = pending_version()
    (dispatch,) = late(pending, [first, second], [here, there], LinkTable(), [TRAINER], 64)
    pending.pulls[first.name] = dispatch
    assert waits(pending, [second], [here, there])
    pending.end(first.name, is_served=True)
    assert late_sources(pending, second, [here, there, first]) == ["b", "trainer"]


def test_trainer_gives_to_one_late_server_at_a_time() -> None:
    first, second, holder = on_own_nodes(3)
    pending = pending_version()
    (dispatch,) = late(pending, [first, second], [], LinkTable(), [TRAINER], 64)
    assert sources(dispatch) == ["trainer"]
    pending.pulls[first.name] = dispatch
    assert waits(pending, [second], [])
    assert late_sources(pending, second, [holder]) == ["s2", "trainer"]


def test_late_server_that_takes_slowly_is_the_last_of_them() -> None:
    holder, slow, healthy = on_own_nodes(3)
    links = LinkTable()
    links.slow_downlinks = frozenset({slow.name})
    dispatches = late(pending_version(), [slow, healthy], [holder], links, [TRAINER], 64)
    assert [(one.client, sources(one)[0]) for one in dispatches] == [(healthy, "s0"), (slow, "trainer")]


def test_trainer_gives_to_late_servers_if_the_chain_should_have_ended_long_ago() -> None:
    frozen, waiting = on_own_nodes(2)
    pending = pending_version()
    pending.pulls = {one.client.name: one for one in chained(pending, [frozen], LinkTable(), [TRAINER], 64)}
    assert waits(pending, [waiting], [])
    (dispatch,) = late(pending, [waiting], [], LinkTable(), [TRAINER], 64, is_overdue=True)
    assert sources(dispatch) == ["trainer"]


@pytest.mark.parametrize(("held", "took_delta", "num_bytes"), [(0, True, 64), (0, False, 1024), (None, True, 1024)])
def test_late_server_takes_the_difference_if_it_holds_the_base_and_its_source_took_it_too(
    held: int | None, took_delta: bool, num_bytes: int
) -> None:
    holder, waiting = on_own_nodes(2)
    waiting.held = held
    pending = pending_version(base_version=0)
    if took_delta:
        pending.took_delta.add(holder.name)
    (dispatch,) = late(pending, [waiting], [holder], LinkTable(), [TRAINER], 64)
    assert dispatch.num_bytes == num_bytes
    assert (dispatch.base_version is None) == (num_bytes == 1024)


def test_servers_without_the_base_are_a_chain_of_their_own() -> None:
    clients = on_own_nodes(3)
    clients[0].held = clients[2].held = 0
    dispatches = chained(pending_version(base_version=0), clients, LinkTable(), [TRAINER], 64)
    assert {one.client.name: (one.base_version, sources(one)[0]) for one in dispatches} == {
        "actor_llm_0": (0, "trainer"),
        "actor_llm_2": (0, "s0"),
        "actor_llm_1": (None, "trainer"),
    }
