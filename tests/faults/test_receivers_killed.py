"""A campaign of seeded faults: receivers in a chain are killed, frozen and slowed down while versions go out.

Processes without a model, real signals. Whatever happens, a version that is announced for a server is there bit by bit,
healthy servers get every version in time, and those that were hit come back by themselves.
"""

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks.receivers import SECRET, ReceiverProcess, forkserver, start
from pipelinerl.records import WeightUpdateSuccess
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.protocol import ParamSpec
from tests.sender_kit import Senders, wait_for

NUM_BYTES = 2 << 20
STALL_S, TIMEOUT_S = 0.5, 60.0
RATE = 40 << 20


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"w": torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)}


def digest(version: int) -> str:
    return hashlib.sha256(weights(version)["w"].numpy()).hexdigest()


class Campaign:
    """Some receivers, a sender to them, and one fault at a time."""

    def __init__(self, count: int, seed: int):
        self.servers = start(range(count), rate=RATE)
        self.random = random.Random(seed)
        settings = {"stall_s": STALL_S, "timeout_s": TIMEOUT_S, "bucket_bytes": 64 << 10}
        self.senders = Senders(*self.servers, secret=SECRET, **settings)
        self.hit: ReceiverProcess | None = None
        self.kind = ""

    def strike(self, kind: str) -> None:
        """Hit one server; the one that was hit before must be well again."""
        self.kind, self.hit = kind, self.random.choice(self.servers)
        if kind == "kill":
            self.hit.process.kill()
        elif kind == "freeze":
            os.kill(self.hit.process.pid, signal.SIGSTOP)
        elif kind == "slow":
            self.hit.ask("rate", 1 << 20)
        elif kind == "slow to take":
            self.hit.ask("downlink", 1 << 20)

    def heal(self) -> None:
        assert self.hit is not None
        if self.kind == "kill":
            self.hit.end()
            (new,) = start([self.hit.index], rate=RATE, port=self.hit.port)
            place = self.servers.index(self.hit)
            self.servers[place] = self.senders.servers[place] = new
        elif self.kind == "freeze":
            os.kill(self.hit.process.pid, signal.SIGCONT)
        elif self.kind == "slow":
            self.hit.ask("rate", RATE)
        elif self.kind == "slow to take":
            self.hit.ask("downlink", 0.0)
        self.hit = None

    def check_bytes(self) -> None:
        """Whatever a server ever had live was exactly that version."""
        for server in self.servers:
            for version, found in server.ask()[1].items():
                assert found == digest(int(version)), (server.index, version)

    def close(self) -> None:
        self.senders.sender.close()
        for server in self.servers:
            server.end()


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    with forkserver():
        yield


@pytest.fixture
def campaign(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Campaign]:
    monkeypatch.setattr("pipelinerl.weights.publish.servers.WATCH_S", 0.1)
    made = Campaign(*request.param)
    yield made
    made.close()


def run(campaign: Campaign, pushes: int) -> float:
    """Heals a server only when all others have the version. Returns the longest time that they took for one."""
    sender, longest = campaign.senders.sender, 0.0
    names = {server.job.name for server in campaign.servers}
    assert sender.wait_for_servers(len(names), 60) == len(names)
    for version in range(pushes):
        kind = campaign.random.choice(["kill", "freeze", "slow", "slow to take", "none"])
        timer = threading.Timer(campaign.random.uniform(0, 0.1), campaign.strike, [kind])
        wait_for(lambda: not sender.is_busy, 3 * TIMEOUT_S)
        began = time.monotonic()
        timer.start()
        sent = weights(version)
        sender.send(version, sent.items(), specs(sent))
        timer.join()
        assert campaign.hit is not None
        well = names - ({campaign.hit.job.name} if kind != "none" else set())
        wait_for(lambda version=version, well=well: well <= holding(campaign, version), 3 * TIMEOUT_S)
        longest = max(longest, time.monotonic() - began)
        campaign.heal()
        assert sender.wait_live(version, 3 * TIMEOUT_S, count=len(names)), (version, kind, sender.outcomes)
    campaign.check_bytes()
    return longest


def specs(sent: dict[str, torch.Tensor]) -> list[ParamSpec]:
    return [spec_of(*item) for item in sent.items()]


def holding(campaign: Campaign, version: int) -> set[str]:
    """Servers that were announced at the version."""
    newest = next((m for m in reversed(campaign.senders.announced) if isinstance(m, WeightUpdateSuccess)), None)
    return set(newest.servers) if newest is not None and newest.version == version else set()


@pytest.mark.parametrize("campaign", [(4, 0)], indirect=True)
def test_faults_in_a_chain_of_four_leave_every_announced_version_exact(campaign: Campaign) -> None:
    run(campaign, 8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("campaign", [(8, 1)], indirect=True)
def test_two_hundred_updates_under_faults_to_eight_servers(campaign: Campaign) -> None:
    assert run(campaign, 200) <= 1.2 * TIMEOUT_S
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("weight")}
    assert len(names) <= 8
    for server in campaign.servers:
        assert len(server.ask()[2]) <= 40


@pytest.mark.parametrize("campaign", [(3, 2)], indirect=True)
def test_frozen_server_keeps_no_version_from_the_others(campaign: Campaign) -> None:
    senders, sender = campaign.senders, campaign.senders.sender
    senders.send(0, weights(0))
    frozen, others = campaign.servers[0], {server.job.name for server in campaign.servers[1:]}
    os.kill(frozen.process.pid, signal.SIGSTOP)
    try:
        for version in (1, 2, 3):
            wait_for(lambda: not sender.is_busy)
            sent = weights(version)
            sender.send(version, sent.items(), specs(sent))
            wait_for(lambda version=version: others <= holding(campaign, version))
            assert senders.announced[-1].older == {frozen.job.name: 0}
        assert {name: outcome.version for name, outcome in sender.outcomes.items() if name in others} == dict.fromkeys(
            others, 3
        )
    finally:
        os.kill(frozen.process.pid, signal.SIGCONT)
    assert sender.wait_live(3, 3 * TIMEOUT_S, count=3)
    campaign.check_bytes()
