"""Communicators of real trainer ranks and receivers in every layout, with NCCL alone faked: few, used again, freed."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from pipelinerl.plan.speed import communicators
from pipelinerl.weights.layout import Layout, spec_of
from pipelinerl.weights.protocol import Address, Failed, WeightUpdateAnswer, WeightUpdateRequest
from pipelinerl.weights.publish.delivery import Pushing
from pipelinerl.weights.publish.dispatch import chained
from pipelinerl.weights.publish.links import HEADS, LinkTable
from pipelinerl.weights.publish.nccl_groups import GroupPlan, kept, planned_groups, rounds
from pipelinerl.weights.publish.origin import Origin, model_stripes
from pipelinerl.weights.publish.ranks import Ranks
from pipelinerl.weights.publish.servers import ServerClient, ServerPool, WeightUpdateError
from pipelinerl.weights.publish.versions import PendingVersion, SnapshotPlan
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.shard import Copy, LoadPlan, Shard, View
from pipelinerl.world import Job
from tests.fake_nccl import Network
from tests.sender_kit import sender_settings, wait_for

SECRET, STALL_S = "x", 20.0
COLUMNS = 4096


@dataclass(eq=False)
class Server(ServerClient):
    """A server whose workers are receivers of this process. Each keeps its rows of the only tensor."""

    receivers: list[Receiver] = field(default_factory=list)
    is_aborted: bool = False
    """Its next update is."""

    async def post(self, request: WeightUpdateRequest, timeout_s: float) -> WeightUpdateAnswer:
        assert request.timeout_s == pytest.approx(0.9 * timeout_s), "its own error would not come first"
        transfers = [receiver.begin(request) for receiver in self.receivers]
        if self.is_aborted:
            self.is_aborted = False
            for transfer in transfers:
                transfer.abandon()
        ends = [await asyncio.to_thread(transfer.reply, 60) for transfer in transfers]
        if failed := [end for end in ends if not isinstance(end, Failed) and end is None] or [
            end.error for end in ends if isinstance(end, Failed)
        ]:
            raise WeightUpdateError(str(failed[0]))
        links = tuple(link for end in ends for link in cast(Any, end).links)
        return WeightUpdateAnswer(
            version=request.version, pause_ms=0, swap_ms=0, transfer_ms=1, prepare_ms=0, links=links
        )


class Unchecked(list["Server"]):
    """A pool whose servers nobody checks."""

    def checker_of(self, client: ServerClient) -> None:
        return None


@dataclass(eq=False)
class Run:
    """A trainer and its servers."""

    origins: list[Origin]
    servers: list[Server]
    pushing: Pushing
    rows: int

    def push(self, version: int) -> list[str]:
        """Sends a version to all servers. Returns the errors of those that did not get it."""
        params = {"w": torch.full((self.rows, COLUMNS), version, dtype=torch.uint8)}
        params["w"][:, 0] = torch.arange(self.rows) % 251
        specs = [spec_of(*item) for item in params.items()]
        for origin in self.origins:
            origin.take_snapshot(version, params.items(), specs, SnapshotPlan())
        layout = Layout(tuple(specs))
        pending = PendingVersion(version, layout, tuple(model_stripes(layout, len(self.origins))))

        async def deliver() -> None:
            for _ in ("the chains", "late servers, which failed before"):
                await self.pushing.deliver(pending, cast(ServerPool, Unchecked(self.servers)))
                await asyncio.gather(*(one.update for one in self.servers if one.update is not None))

        asyncio.run(deliver())
        for server in self.servers:
            server.is_up = True
            if server.last is not None and server.last.answer is not None:
                height = self.rows // len(server.receivers)
                for number, receiver in enumerate(server.receivers):
                    _, held = receiver.staged(version)
                    assert torch.equal(held.view(height, COLUMNS), params["w"][number * height : (number + 1) * height])
        return [one.last.error for one in self.servers if one.last is not None and one.last.error]

    def close(self) -> None:
        asyncio.run(self.pushing.close())
        for origin in self.origins:
            origin.close()
        for server in self.servers:
            for receiver in server.receivers:
                receiver.close()


@contextmanager
def running(
    monkeypatch: pytest.MonkeyPatch, network: Network, servers: int, tp: int, ranks: int, stall_s: float = STALL_S
) -> Iterator[Run]:
    monkeypatch.setattr("pipelinerl.weights.transfer.source.VllmNccl", lambda device: network.process())
    settings = sender_settings(secret=SECRET, transport="nccl", bucket_bytes=1 << 20, stall_s=stall_s)
    origins = [Origin(settings, sender="s", rank=rank, ranks=ranks) for rank in range(ranks)]
    made = []
    for place in range(servers):
        job = Job(name=f"s{place}", kind="actor_llm", replica_idx=place)
        server = Server(job, cast(Any, None), is_up=True)
        server.receivers = [receiver(number, tp) for number in range(tp)]
        server.workers = tuple(one.address for one in server.receivers)
        made.append(server)
    pushing = Pushing(Ranks(origins[0], [one.address for one in origins[1:]], settings), settings, sender="s", wake=int)
    run = Run(origins, made, pushing, rows=math.lcm(tp, 32 * ranks))
    try:
        yield run
    finally:
        run.close()


def receiver(number: int, tp: int) -> Receiver:
    def learn(layout: Layout, starts: Any) -> Shard | None:
        rows, columns = layout.specs[0].shape
        height = rows // tp
        view = View(number * height * columns, (height, columns), (columns, 1))
        plan = LoadPlan((Copy("w", View(0, view.size, view.stride), "w", view),), ())
        return None if tp == 1 else Shard.of(layout, plan, starts)

    return Receiver(
        index=number,
        host="127.0.0.1",
        secret=SECRET,
        device=torch.device("cpu"),
        allocate=lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
        prepare=lambda layout, buffer: None,
        learn=learn,
    )


def is_freed(network: Network) -> bool:
    return not any(network.live.values())


def count(monkeypatch: pytest.MonkeyPatch, servers: int, tp: int, ranks: int, pushes: int, aborted: int) -> Network:
    """Makes pushes, of which some are aborted by a server, each by another one."""
    network = Network()
    with running(monkeypatch, network, servers, tp, ranks) as run:
        whole = servers * run.rows * COLUMNS
        for version in range(HEADS):  # the chains of the first updates begin at different servers
            assert run.push(version) == []
        formed = network.connects
        assert network.num_bytes > HEADS * whole / 2  # a link may have no group
        assert run.push(HEADS) == []
        assert network.connects == formed
        for version in range(HEADS + 1, pushes):
            is_aborted = version % (pushes // aborted) == 0
            if is_aborted:
                run.servers[version % servers].is_aborted = True
            assert len(run.push(version)) <= is_aborted
    wait_for(lambda: is_freed(network))
    return network


@pytest.mark.parametrize(("servers", "tp", "ranks"), [(4, 1, 4), (2, 2, 4), (1, 8, 8), (8, 1, 1)])
def test_no_process_has_more_than_four_communicators(
    monkeypatch: pytest.MonkeyPatch, servers: int, tp: int, ranks: int
) -> None:
    assert count(monkeypatch, servers, tp, ranks, pushes=20, aborted=5).most <= 4


@pytest.mark.parametrize(
    ("servers", "tp", "ranks"),
    [(4, 1, 4), (8, 1, 8), (2, 2, 4), (1, 8, 8), (2, 8, 16), (8, 8, 64), (16, 1, 4), (3, 4, 8), (64, 1, 1)],
)
def test_plan_counts_the_communicators_of_every_layout(servers: int, tp: int, ranks: int) -> None:
    clients = [
        ServerClient(Job(name=f"s{n}", kind="actor_llm", replica_idx=n), cast(Any, None)) for n in range(servers)
    ]
    for client in clients:
        client.workers = tuple(Address(client.name, 1 + number) for number in range(tp))
    layout = Layout((spec_of("w", torch.empty(ranks << 20, dtype=torch.uint8, device="meta")),))
    pending = PendingVersion(0, layout, tuple(model_stripes(layout, ranks)))
    addresses = [Address("trainer", 1 + rank) for rank in range(ranks)]
    plans = planned_groups(chained(pending, clients, LinkTable(), addresses, 1 << 20), addresses)
    counts = Counter(member for plan in plans for member in plan.members)
    assert {counts[rank] for rank in addresses} == {1}
    assert max(counts[worker] for client in clients for worker in client.workers) <= communicators(servers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "tp", "ranks"),
    [(8, 1, 8), (2, 8, 16), (8, 2, 2), (3, 1, 8), (16, 1, 4), (4, 4, 8), (8, 8, 64)],
)
def test_no_process_has_more_than_four_communicators_in_large_layouts(
    monkeypatch: pytest.MonkeyPatch, servers: int, tp: int, ranks: int
) -> None:
    assert count(monkeypatch, servers, tp, ranks, pushes=20, aborted=5).most <= 4


def test_group_that_does_not_form_is_given_up_and_the_update_comes_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member leaves between the id and the connection, so all others wait for ever."""
    network = Network(never_joins=lambda rank, size: size == 4 and rank == 2)
    with running(monkeypatch, network, servers=2, tp=1, ranks=2, stall_s=1.0) as run:
        assert run.push(0) == []
        assert network.num_bytes < 2 * run.rows * COLUMNS
        assert run.pushing.failed_groups == {"lo": 1}
        network.never_joins = lambda rank, size: False
        for version in range(1, 4):
            assert run.push(version) == []
        assert network.num_bytes >= 2 * run.rows * COLUMNS, "it was tried again"
        assert run.pushing.failed_groups == {"lo": 1}


def test_transfer_that_does_not_end_breaks_its_group_and_the_update_comes_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Network()
    with running(monkeypatch, network, servers=2, tp=1, ranks=1, stall_s=1.0) as run:
        assert run.push(0) == []
        over_nccl = network.num_bytes
        assert run.pushing.failed_groups == {}
        network.loses = True
        assert run.push(1) == []
        assert network.num_bytes == over_nccl
        network.loses = False
        assert run.push(2) == []
        assert network.num_bytes == 2 * over_nccl  # formed again
        assert sum(run.pushing.failed_groups.values()) >= 1
    wait_for(lambda: is_freed(network))


def test_groups_that_share_a_member_form_one_after_the_other() -> None:
    plans = [GroupPlan(("t",), ("a", "b")), GroupPlan(("a",), ("b",)), GroupPlan(("b",), ("c",))]  # type: ignore[arg-type]
    plans += [GroupPlan(("c",), ("d",))]  # type: ignore[arg-type]
    assert rounds(plans) == [[plans[0], plans[3]], [plans[1]], [plans[2]]]


def test_groups_out_of_use_stay_as_long_as_there_is_room() -> None:
    wanted = [GroupPlan(("t",), ("a",)), GroupPlan(("a",), ("b",))]  # type: ignore[arg-type]
    larger, unused = GroupPlan(("t",), ("a", "b")), [GroupPlan((f"x{n}",), ("a",)) for n in range(3)]  # type: ignore[arg-type]
    assert kept([larger, *unused], wanted) == {larger, *unused[:2]}


def test_larger_group_does_not_stay_where_a_member_that_is_not_wanted_has_no_room_for_it() -> None:
    """A head of the last update's chains is in the middle of this one's, and has as many pairs as it may."""
    head, pairs = GroupPlan(("t",), ("a",)), [GroupPlan((f"x{n}",), ("b",)) for n in range(4)]  # type: ignore[arg-type]
    larger = GroupPlan(("t",), ("a", "b"))  # type: ignore[arg-type]
    assert kept([larger, *pairs], [head, *pairs]) == set(pairs)
    assert kept([larger, *pairs], [head, *pairs[1:]]) == {larger, *pairs[1:]}
