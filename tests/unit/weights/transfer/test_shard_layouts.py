"""Shards at real numbers of layers, tokens, workers, ranks and servers: every worker has exactly what it loads."""

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.load.learning import learn
from pipelinerl.weights.load.live_check import differing
from pipelinerl.weights.protocol import Failed, Staged, WeightUpdateRequest
from pipelinerl.weights.publish.origin import Origin, model_stripes
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.transfer.chain import Route, chain, join
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.shard import LoadPlan, Shard, staged_copies
from tests.sender_kit import sender_settings
from tests.tensor_parallel import Decoder, Shape, Weights, gathered, put

SECRET = "unit-test-secret"
LARGE = Shape(vocab=32_000, layers=24)
"""Its embedding of 4 MB is larger than a bucket and than a stripe of eight."""


def layout_of(given: Weights) -> Layout:
    return Layout(tuple(spec_of(*item) for item in given.items()))


def plan_of(shape: Shape, layout: Layout, rank: int, size: int) -> LoadPlan:
    with torch.device("meta"):
        model = Decoder(shape, rank, size)
    return learn(model, model.load_weights, layout.specs)


def shard_of(shape: Shape, layout: Layout, ranks: int, rank: int, size: int) -> Shard:
    starts = [start for start, _ in model_stripes(layout, ranks)]
    return Shard.of(layout, plan_of(shape, layout, rank, size), starts)


def loads_the_same(shape: Shape, rank: int, size: int, shard: Shard, buffer: torch.Tensor, theirs: Weights) -> bool:
    """Whether the shard, copied into place, is what the loaders make of the whole version."""
    a, b = Decoder(shape, rank, size), Decoder(shape, rank, size)
    put(a, plan_of(shape, shard.layout, rank, size), shard, buffer)
    b.load_weights(theirs.items())
    return all(torch.equal(tensor, b.params[name]) for name, tensor in a.params.items())


@pytest.mark.parametrize(
    ("shape", "size", "ranks", "bucket"),
    [
        (LARGE, 2, 1, 1 << 20),
        (LARGE, 4, 8, 1 << 20),
        (LARGE, 8, 64, 1 << 20),
        (LARGE, 8, 3, 99_999),
        (Shape(vocab=32_003, tied=False, dtype=torch.float32), 4, 5, 1 << 20),
        (Shape(vocab=101, tied=False), 8, 1, 1 << 20),
        (Shape(vocab=101), 8, 2, 64),
    ],
)
def test_every_worker_loads_from_its_shard_what_it_loads_from_the_whole(
    shape: Shape, size: int, ranks: int, bucket: int
) -> None:
    given = shape.weights()
    layout = layout_of(given)
    whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, whole).fill(given.items())
    for rank in sorted({0, 1, size // 2, size - 1}):
        shard = shard_of(shape, layout, ranks, rank, size)
        buffer = gathered(shard, whole, bucket)
        assert loads_the_same(shape, rank, size, shard, buffer, given), rank
        plan, model = plan_of(shape, layout, rank, size), Decoder(shape, rank, size)
        model.load_weights(given.items())
        live = dict(model.named_parameters())
        assert next(differing(staged_copies(layout, plan, shard), live, buffer), None) is None
        assert (plan.unlearned, shard.whole) == ((), ())
        assert sum(map(len, shard.stripes.values())) <= 2 * (len(plan.copies) + ranks * 3)
        kept = sum(tensor.nbytes for tensor in model.params.values())
        row_bytes, largest = shape.dtype.itemsize * shape.hidden // size, shape.hidden * shape.inter
        torn = (ranks - 1) * largest * shape.dtype.itemsize if row_bytes % 64 else 0  # kept whole, one at an edge
        assert shard.num_bytes <= kept + 64 * sum(map(len, shard.stripes.values())) + torn


SIZE, SERVERS, DYING, BUCKET = 2, 64, (0, 17, 40, 63), 16 << 10


class Worker:
    """One tensor-parallel worker. Its process may die when it has forwarded so many buckets."""

    def __init__(self, shape: Shape, shards: Sequence[Shard], rank: int, *, dies_after: int | None = None):
        self.shape, self.shard, self.rank = shape, shards[rank], rank
        self._left, self._lock = dies_after, threading.Lock()
        self.receiver = Receiver(
            index=rank,
            host="127.0.0.1",
            secret=SECRET,
            device=torch.device("cpu"),
            allocate=lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
            prepare=lambda layout, buffer: None,
            learn=lambda layout, starts: self.shard,
            pace=self._pace,
        )

    def _pace(self, num_bytes: int) -> None:
        with self._lock:
            if self._left is None or self._left < 0:
                return
            self._left -= 1
            is_over = self._left < 0
        if is_over:  # in another thread, because the end waits for this one
            threading.Thread(target=self.receiver.close).start()

    def holds(self, version: int, given: Weights) -> bool:
        _, buffer = self.receiver.staged(version)
        return loads_the_same(self.shape, self.rank, SIZE, self.shard, buffer, given)


class Fleet:
    """Two trainer ranks and their servers of two workers each."""

    def __init__(self) -> None:
        self.shape = Shape(vocab=2_000, layers=24)
        self.given = self.shape.weights()
        self.layout = layout_of(self.given)
        self.shards = [shard_of(self.shape, self.layout, 2, rank, SIZE) for rank in range(SIZE)]
        self.origins = [Origin(sender_settings(secret=SECRET), sender="run", rank=rank, ranks=2) for rank in range(2)]
        self.servers: list[list[Worker]] = []

    def start(self, *, dies_after: int | None = None) -> list[Worker]:
        server = [Worker(self.shape, self.shards, rank, dies_after=dies_after) for rank in range(SIZE)]
        self.servers.append(server)
        return server

    @property
    def stripes(self) -> list:
        return [*zip(model_stripes(self.layout, 2), [origin.address for origin in self.origins], strict=True)]

    @property
    def sent_bytes(self) -> int:
        return sum(origin.source_server.num_bytes for origin in self.origins)

    def take_snapshot(self) -> None:
        for origin in self.origins:
            origin.take_snapshot(0, self.given.items(), self.layout.specs, SnapshotPlan())

    def pull(self, servers: Sequence[Sequence[Worker]], routes: Sequence[Route]) -> list[list[Staged | Failed | None]]:
        transfers = []
        for server, route in zip(servers, routes, strict=True):
            request = WeightUpdateRequest(
                sender="run",
                version=0,
                params=self.layout.specs,
                workers=route,
                transport="tcp",
                bucket_bytes=BUCKET,
                timeout_s=100.0,
                stall_s=20.0,
            )
            transfers.append([worker.receiver.begin(request) for worker in server])
        return [[transfer.reply(100) for transfer in server] for server in transfers]

    def close(self) -> None:
        for server in self.servers:
            for worker in server:
                worker.receiver.close()
        for origin in self.origins:
            origin.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    try:
        yield made
    finally:
        made.close()


def addresses(server: Sequence[Worker]) -> list:
    return [worker.receiver.address for worker in server]


@pytest.mark.slow
def test_deaths_within_a_chain_of_64_servers_cost_nobody_else_the_version(fleet: Fleet) -> None:
    servers = [fleet.start(dies_after=4 if number in DYING else None) for number in range(SERVERS)]
    fleet.take_snapshot()
    ends = fleet.pull(servers, chain([addresses(server) for server in servers], fleet.stripes))
    living = [server for number, server in enumerate(servers) if number not in DYING]
    for number, (server, replies) in enumerate(zip(servers, ends, strict=True)):
        if number not in DYING:
            assert all(isinstance(end, Staged) for end in replies), (number, replies)
            assert all(worker.holds(0, fleet.given) for worker in server), number
    stripe = fleet.stripes[0][0][1]
    assert fleet.sent_bytes <= fleet.layout.num_bytes + stripe, "what the first of the first chain took is sent again"
    assert (
        max(worker.receiver.source_server.num_bytes for server in living for worker in server)
        <= 2 * fleet.layout.num_bytes
    )
    before = fleet.sent_bytes
    restarted = fleet.start()
    near = [addresses(server) for server in living[-3:]]
    [replies] = fleet.pull([restarted], [join(addresses(restarted), near, fleet.stripes)])
    assert all(isinstance(end, Staged) for end in replies), replies
    assert all(worker.holds(0, fleet.given) for worker in restarted)
    assert fleet.sent_bytes == before
