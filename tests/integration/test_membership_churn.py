"""Servers come, drain, die and come back during one run: the actor uses those that are there, and no sample is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelinerl.membership.lease import Lease
from pipelinerl.membership.registration import Registration, new_incarnation
from pipelinerl.membership.stores import FolderStore
from pipelinerl.membership.watch import MembershipWatch
from pipelinerl.records import RolloutGroup
from pipelinerl.testing import FakeServer
from tests.actor_run import ATTEMPTS, BATCH, Run, answer_largest, make_runs

ROUNDS = 20
TTL_S = 2.0


@dataclass
class Joiner:
    """A fake server with a lease of its own."""

    server: FakeServer
    registration: Registration
    is_alive: bool = True

    @classmethod
    async def start(cls, store: FolderStore, name: str) -> "Joiner":
        server = FakeServer(answer_largest, delay_s=0.05)
        await server.start()
        lease = Lease(name=name, incarnation=new_incarnation(), ttl_s=TTL_S, state="ready", url=server.url)
        joiner = cls(server, None)  # type: ignore[arg-type]
        joiner.registration = Registration(
            store, lease, life=lambda: time.monotonic() if joiner.is_alive else 0.0, on_taken=lambda: None
        )
        return joiner

    async def kill(self) -> None:
        """As by SIGKILL: connections break, and the lease is not given back."""
        self.is_alive = False
        await self.server.stop()

    async def leave(self) -> None:
        """As a server does that was asked to: it drains, then goes."""
        self.registration.update(state="draining")
        deadline = time.monotonic() + 60
        while self.server.num_answering:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        self.registration.close()
        await self.server.stop()


@pytest.fixture
async def make_run(tmp_path: Path) -> AsyncIterator[Callable]:
    async with make_runs(tmp_path) as make:
        yield make


async def test_servers_that_come_and_go_twenty_times_lose_no_sample(make_run: Callable) -> None:
    run: Run = await make_run("finetune.max_train_steps=1000", f"launcher.lease_ttl_s={TTL_S}")
    store = FolderStore(run.run_dir)
    view = MembershipWatch(store, [])
    run.start_process()
    version, joiners = 0, []

    async def announce_next() -> None:
        """The test plays the trainer: whoever's lease holds gets the next version. Ends when its room is used up."""
        nonlocal version
        version += 1
        for server in (*run.servers, *(joiner.server for joiner in joiners)):
            server.version = version
        run.update(version, 0, *(int(name.rpartition("_")[2]) for name in view.servers("actor_llm")))
        await run.until(lambda: len(run.records) >= groups_until(version))

    try:
        for turn in range(ROUNDS):
            joiners.append(joiner := await Joiner.start(store, f"actor_llm_{turn % 3 + 1}"))
            while not joiner.server.requests:
                await announce_next()
            await (joiner.kill() if turn % 2 else joiner.leave())
        await announce_next()
    finally:
        view.close()
        for joiner in joiners:
            joiner.registration.close()
    assert sorted(record.dispatch_index for record in run.records) == list(range(groups_until(version)))
    assert all(isinstance(record, RolloutGroup) and len(record.rollouts) == ATTEMPTS for record in run.records)


def groups_until(version: int) -> int:
    """Groups that fit under the pacing rule with `max_lag_steps=1`."""
    return (version + 2) * BATCH // ATTEMPTS
