"""From which servers one that joins a version pulls it."""

from typing import Any, cast

from pipelinerl.membership.lease import Lease
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import Address, ParamSpec
from pipelinerl.weights.publish.dispatch import chained, joining
from pipelinerl.weights.publish.server_client import ServerClient
from pipelinerl.weights.publish.versions import PendingVersion
from pipelinerl.world import Job

TRAINER = Address("trainer", 1)


def servers(count: int) -> list[ServerClient]:
    made = [ServerClient(Job(name=f"s{n}", kind="actor_llm", replica_idx=n), cast(Any, None)) for n in range(count)]
    for client in made:
        client.workers, client.is_up = (Address(client.name, 1),), True
    return made


def under_way(clients: list[ServerClient]) -> PendingVersion:
    """A version that these servers pull in a chain."""
    pending = PendingVersion(1, Layout((ParamSpec("w", "uint8", (1024,)),)), ((0, 1024),))
    pending.pulls = {one.client.name: one for one in chained(pending, clients, [TRAINER], 64)}
    return pending


def sources(pending: PendingVersion, client: ServerClient, holders: list[ServerClient]) -> list[str]:
    (dispatch,) = joining(pending, [client], holders, [TRAINER], 64)
    return [address.host for address in dispatch.route[0][0].sources]


def test_chain_of_servers_that_are_known_by_their_leases_enters_every_other_node_once() -> None:
    """A lease does not say the node. Server n runs on node n mod 2."""
    clients = []
    for n in range(8):
        lease = Lease(name=f"actor_llm_{n}", incarnation="a", ttl_s=10, url=f"http://node{n % 2}:80{n}")
        client = ServerClient(lease.as_job(), cast(Any, None))
        client.workers, client.is_up = (Address(f"node{n % 2}", 9000 + n),), True
        clients.append(client)
    pending = PendingVersion(1, Layout((ParamSpec("w", "uint8", (1024,)),)), ((0, 1024),))
    planned = chained(pending, clients, [TRAINER], 64)
    givers = [(one.client.node, one.route[0][0].sources[0].host) for one in planned]
    assert sum(node != giver for node, giver in givers if giver != TRAINER.host) == 1


def test_late_server_pulls_from_the_end_of_the_chain_that_is_under_way() -> None:
    *chain, late = servers(6)
    assert sources(under_way(chain), late, chain) == ["s4", "s3", "s2", "trainer"]


def test_late_server_does_not_pull_from_slow_ones() -> None:
    *chain, late = servers(4)
    chain[2].standing.takes_slowly = True
    assert sources(under_way(chain), late, chain) == ["s1", "s0", "trainer"]


def test_server_whose_pull_failed_pulls_from_nobody_who_may_wait_for_it() -> None:
    """s2 asks s1, and s1 has failed. s0 has the version by now."""
    clients = servers(3)
    pending = under_way(clients)
    pending.end("s0", is_served=True)
    pending.end("s1", is_served=False)
    assert sources(pending, clients[1], [clients[0], clients[2]]) == ["s0", "trainer"]


def test_pullers_of_a_difference_do_not_have_the_whole_version_yet() -> None:
    *chain, late = servers(3)
    for client in chain:
        client.held = 0
    pending = PendingVersion(1, Layout((ParamSpec("w", "uint8", (1024,)),)), ((0, 1024),), 0, ((0, 64),))
    pending.pulls = {one.client.name: one for one in chained(pending, chain, [TRAINER], 64)}
    assert sources(pending, late, chain) == ["trainer"]
