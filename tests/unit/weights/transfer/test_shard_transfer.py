"""Workers that keep a shard each: each pulls its own bytes, from workers that keep the same ones."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipelinerl.weights.layout import Layout, spec_of
from pipelinerl.weights.protocol import Address, Describe, Staged, WeightUpdateRequest
from pipelinerl.weights.publish.origin import Origin, model_stripes
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.transfer.chain import Route, chain, join
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.shard import Copy, LoadPlan, Shard, View, staged_copies
from tests.sender_kit import sender_settings

SECRET = "unit-test-secret"
BUCKET = 64 << 10
MIB = 1 << 20
Weights = dict[str, torch.Tensor]


def weights(seed: int, rows: int = 512) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 1024, generator=generator).bfloat16() for name in ("rows", "columns")}


def layout_of(given: Weights) -> Layout:
    return Layout(tuple(spec_of(*item) for item in given.items()))


LAYOUT = layout_of(weights(0))


def mine(given: Weights, rank: int, size: int = 2) -> Weights:
    return {"rows": given["rows"].chunk(size, 0)[rank], "columns": given["columns"].chunk(size, 1)[rank]}


def plan_of(layout: Layout, rank: int, size: int = 2) -> LoadPlan:
    parts = mine({spec.name: torch.empty(spec.shape, dtype=torch.bfloat16) for spec in layout.specs}, rank, size)
    copies = [Copy(name, View.of(torch.empty(0)), name, View.of(part)) for name, part in parts.items()]
    return LoadPlan(tuple(copies), ())


def shard_of(layout: Layout, starts: list[int], rank: int, size: int = 2) -> Shard:
    return Shard.of(layout, plan_of(layout, rank, size), starts)


class Worker:
    """A receiver of one of two tensor-parallel workers, or of one whose loaders are not known."""

    def __init__(self, rank: int, *, is_learned: bool = True, starts: list[int] | None = None):
        self.rank, self.is_learned = rank, is_learned
        self.shard = shard_of(LAYOUT, starts or [start for start, _ in model_stripes(LAYOUT, 2)], rank)
        self.receiver = Receiver(
            index=rank,
            host="127.0.0.1",
            secret=SECRET,
            device=torch.device("cpu"),
            allocate=lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
            prepare=lambda layout, buffer: None,
            learn=lambda layout, starts: self.shard if is_learned else None,
        )

    @property
    def address(self) -> Address:
        return self.receiver.address

    def holds(self, version: int, given: Weights) -> bool:
        layout, buffer = self.receiver.staged(version)
        if not self.is_learned:
            return all(torch.equal(view, given[name]) for name, view in layout.views(buffer))
        assert buffer.numel() == LAYOUT.num_bytes // 2
        copies, expected = staged_copies(layout, plan_of(layout, self.rank), self.shard), mine(given, self.rank)
        return all(torch.equal(one.source(buffer), expected[one.target]) for one in copies)


class Update:
    """Two trainer ranks, and two servers of two workers that pull from them."""

    def __init__(self, *, is_learned: bool = True) -> None:
        settings = sender_settings(secret=SECRET, delta=True)
        self.origins = [Origin(settings, sender="run", rank=rank, ranks=2) for rank in range(2)]
        self.servers = [[Worker(rank, is_learned=is_learned) for rank in range(2)] for _ in range(2)]
        self._stripes = model_stripes(LAYOUT, 2)

    @property
    def workers(self) -> list[Worker]:
        return [worker for server in self.servers for worker in server]

    @property
    def sent_bytes(self) -> int:
        return sum(origin.source_server.num_bytes for origin in self.origins)

    def parts(self, ends: list[int] | None = None) -> list[tuple[tuple[int, int], Address]]:
        ends = ends or [end for _, end in self._stripes]
        return [((s, end), o.address) for (s, _), end, o in zip(self._stripes, ends, self.origins, strict=True)]

    def take_snapshot(self, version: int, given: Weights) -> None:
        for origin in self.origins:
            origin.take_snapshot(version, given.items(), LAYOUT.specs, SnapshotPlan(is_delta=version > 0))

    def pull(
        self, servers: list[list[Worker]], version: int, routes: list[Route], base_version: int | None = None
    ) -> None:
        transfers = []
        for server, route in zip(servers, routes, strict=True):
            request = WeightUpdateRequest(
                sender="run",
                version=version,
                params=LAYOUT.specs,
                workers=route,
                transport="tcp",
                bucket_bytes=BUCKET,
                timeout_s=60.0,
                stall_s=60.0,
                base_version=base_version,
            )
            transfers += [worker.receiver.begin(request) for worker in server]
        for transfer in transfers:
            assert isinstance(transfer.reply(60), Staged), transfer.end

    def send(self, version: int) -> None:
        """All servers take the whole version."""
        routes = chain([[worker.address for worker in server] for server in self.servers], self.parts())
        self.pull(self.servers, version, routes)

    def send_delta(self, version: int) -> None:
        described = [origin.describe(Describe(version=version)) for origin in self.origins]
        ends = [start + (d.delta_bytes or 0) for (start, _), d in zip(self._stripes, described, strict=True)]
        routes = chain([[worker.address for worker in server] for server in self.servers], self.parts(ends))
        self.pull(self.servers, version, routes, base_version=version - 1)

    def close(self) -> None:
        for worker in self.workers:
            worker.receiver.close()
        for origin in self.origins:
            origin.close()


@contextmanager
def updating(**options: bool) -> Iterator[Update]:
    made = Update(**options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def update() -> Iterator[Update]:
    with updating() as made:
        yield made


def test_every_worker_receives_and_forwards_its_shard_once(update: Update) -> None:
    given = weights(0)
    update.take_snapshot(0, given)
    update.send(0)
    assert all(worker.holds(0, given) for worker in update.workers)
    assert update.sent_bytes == LAYOUT.num_bytes, "the trainer sends the model once"
    forwarded = sum(worker.receiver.source_server.num_bytes for worker in update.workers)
    assert forwarded == LAYOUT.num_bytes, "so each worker of the other server receives its shard, and no more"
    assert max(worker.receiver.source_server.num_bytes for worker in update.workers) <= LAYOUT.num_bytes // 2


def test_differences_reach_every_shard_and_leave_the_trainer_once(update: Update) -> None:
    given = weights(0)
    update.take_snapshot(0, given)
    update.send(0)
    for version in (1, 2):
        for tensor in given.values():
            tensor.view(-1)[version :: 1000 + version] += 1.0
        update.take_snapshot(version, given)
        before = update.sent_bytes
        update.send_delta(version)
        assert all(worker.holds(version, given) for worker in update.workers)
        assert update.sent_bytes - before < LAYOUT.num_bytes / 50
        assert [worker.receiver.is_sent(version, worker.shard) for worker in update.workers] == [True] * 4


def test_late_server_is_fed_by_one_that_has_the_version_also_after_a_difference(update: Update) -> None:
    given = weights(0)
    update.take_snapshot(0, given)
    update.send(0)
    given["rows"][::7] += 1.0
    update.take_snapshot(1, given)
    update.send_delta(1)
    late = [Worker(0), Worker(1)]
    holders = [[worker.address for worker in server] for server in update.servers]
    before = update.sent_bytes
    update.pull([late], 1, [join([worker.address for worker in late], holders, update.parts())])
    update.servers.append(late)
    assert all(worker.holds(1, given) for worker in late)
    assert update.sent_bytes == before


def test_workers_whose_loaders_are_not_known_take_the_whole_from_each_other() -> None:
    with updating(is_learned=False) as update:
        given = weights(0)
        update.take_snapshot(0, given)
        update.send(0)
        assert all(worker.holds(0, given) for worker in update.workers)
        assert update.sent_bytes == LAYOUT.num_bytes


def test_worker_compares_its_shard_with_the_trainers_bytes(update: Update) -> None:
    given = weights(0)
    update.take_snapshot(0, given)
    update.send(0)
    worker = update.workers[1]
    assert worker.receiver.is_sent(0, worker.shard) is True
    worker.receiver.staged(0)[1][-1] ^= 1
    assert worker.receiver.is_sent(0, worker.shard) is False
    update.take_snapshot(1, given)
    update.take_snapshot(2, given)
    assert worker.receiver.is_sent(0, worker.shard) is None, "the trainer has replaced these bytes"
    assert worker.receiver.is_sent(1, worker.shard) is None, "the worker does not have this version"


SIZE, ROWS, PEAK_BUCKET = 4, 32 << 10, 8 * MIB
"""128 MB of bfloat16 for four workers."""


def _peak(origin: Address, result: "multiprocessing.connection.Connection") -> None:
    """One worker of four pulls its shard. Sends the peak of its resident memory over that before, in bytes."""
    given = {name: torch.empty(ROWS, 1024, dtype=torch.bfloat16, device="meta") for name in ("rows", "columns")}
    layout = layout_of(given)
    shard = shard_of(layout, [0], 1, SIZE)
    receiver = Receiver(
        index=0,
        host="127.0.0.1",
        secret=SECRET,
        device=torch.device("cpu"),
        allocate=lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
        prepare=lambda layout, buffer: None,
        learn=lambda layout, starts: shard,
    )
    part = ((0, layout.num_bytes), origin)
    request = WeightUpdateRequest(
        sender="run",
        version=0,
        params=layout.specs,
        workers=chain([[receiver.address]], [part])[0],
        transport="tcp",
        bucket_bytes=PEAK_BUCKET,
        timeout_s=60.0,
        stall_s=5.0,
    )
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    transfer = receiver.begin(request)
    transfer.ended.wait()
    result.send((transfer.end, _resident("VmHWM") - before))


def _resident(key: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) << 10


def test_worker_of_four_needs_its_shard_and_two_buckets_at_most() -> None:
    origin = Origin(sender_settings(secret=SECRET), sender="run")
    given = weights(0, ROWS)
    ours, theirs = multiprocessing.Pipe()
    try:
        origin.take_snapshot(0, given.items(), layout_of(given).specs, SnapshotPlan())
        process = multiprocessing.get_context("spawn").Process(target=_peak, args=(origin.address, theirs))
        process.start()
        assert ours.poll(200)
        end, peak = ours.recv()
        process.join()
    finally:
        origin.close()
    assert isinstance(end, Staged), end
    assert end.staged_bytes == layout_of(given).num_bytes // SIZE
    assert peak <= end.staged_bytes + 2 * PEAK_BUCKET
