"""A version of a server is unverified until its probe is over: the real sender and the real actor, fake servers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.actor.answer_journal import FOLDER
from pipelinerl.inspect.ledger import ledger_of, read_ledger
from pipelinerl.records import ProbeMissed, Rollout, RolloutGroup, TrainingDone, WeightUpdateSuccess
from pipelinerl.testing import FakeServer
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.publish.sender import WeightSender
from pipelinerl.weights.verify.probe import ProbeText
from tests.actor_run import ATTEMPTS, Run, answer_largest, make_runs
from tests.integration.conftest import SECRET, ModelServer
from tests.sender_kit import sender_settings
from tests.waiting import wait_until

GROUPS = 8
"""Groups per optimizer step."""


class ProbedServer(ModelServer):
    """Compares its live tensors with the sent ones, as a worker does. Its completions come from a `FakeServer`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.fake = FakeServer(answer_largest, version="default")
        self.swallows = False
        """Whether it keeps its old tensors at the next swap."""
        self.may_check = threading.Event()
        """While it is not set, the probe does not end."""
        self.may_check.set()
        self.may_swap = threading.Event()
        """While it is not set, it goes on with its old weights."""
        self.may_swap.set()

    @property
    def attempts(self) -> int:
        """Attempts that it has been asked for."""
        return sum(request["sampling_params"].get("n", 1) for request in self.fake.requests)

    async def swap(self, version: int) -> tuple[float, float]:
        await asyncio.to_thread(self.may_swap.wait)
        live = self.live
        took = await super().swap(version)
        if self.swallows:
            self.live, self.swallows = live, False
        self.fake.version = version
        return took

    def weight_check(self, version: int) -> dict[str, Any] | None:
        if not self.may_check.is_set():
            return None
        layout, buffer = self.receiver.staged(version)
        sent = dict(layout.views(buffer))
        differing = [name for name, tensor in sent.items() if not torch.equal(tensor, self.live[name])]
        return {"is_checked": True, "differing": differing}


class Stage:
    """An actor and a sender around the same servers."""

    def __init__(self, run: Run, servers: list[ProbedServer]):
        self.run, self.servers = run, servers
        run.start()
        self.sender = WeightSender(
            lambda: [server.job for server in servers],
            sender_settings(secret=SECRET, bucket_bytes=1 << 16, timeout_s=200, probe_tolerance=0.1),
            run.trainer.write,
        )
        self.sender.check_with(ProbeText(token_ids=np.zeros((1, 8), dtype=np.int32)))

    async def push(self, version: int) -> None:
        await asyncio.to_thread(self.sender.wait_for_servers, len(self.servers), 60)
        weights = {"w": torch.full((64,), float(version))}
        self.sender.send(version, weights.items(), [spec_of(*item) for item in weights.items()])
        await asyncio.to_thread(self.sender.wait_live, version, 60)

    async def until(self, condition: Callable[[], bool]) -> None:
        await self.run.until(condition, timeout_s=120)

    @property
    def groups(self) -> list[RolloutGroup]:
        self.run.read()
        return [record for record in self.run.records if isinstance(record, RolloutGroup)]


def versions(rollout: Rollout) -> set[int]:
    return {int(version) for sequence in rollout.sequences for version in sequence.spans[:, 2]}


@pytest.fixture
async def make_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    monkeypatch.setenv("PIPELINERL_SECRET", SECRET)
    monkeypatch.setattr("pipelinerl.actor.publish_gate.CHECK_WAIT_S", 1000.0)  # these tests end waits by themselves
    stages: list[Stage] = []
    async with make_runs(tmp_path) as make:

        async def start(count: int) -> Stage:
            servers = [ProbedServer(f"actor_llm_{i}") for i in range(count)]
            run = await make(
                f"finetune.gradient_accumulation_passes={GROUPS * ATTEMPTS}",
                "max_lag_steps=0",
                "actor.rollout_workers=1",
                fakes=[server.fake for server in servers],
            )
            stages.append(Stage(run, servers))
            return stages[-1]

        yield start
    for stage in stages:
        for server in stage.servers:
            server.may_check.set()
        await asyncio.to_thread(stage.sender.close)
        for server in stage.servers:
            await asyncio.to_thread(server.stop)


async def test_rollouts_of_a_server_that_swallowed_an_update_are_not_published_and_are_counted(
    make_stage: Callable,
) -> None:
    stage = await make_stage(2)
    run, (honest, liar) = stage.run, stage.servers
    await stage.push(0)
    await stage.until(lambda: len(stage.groups) == GROUPS)
    liar.swallows = True
    liar.may_check.clear()
    honest.may_swap.clear()
    before = liar.attempts
    await stage.push(1)  # the liar alone serves version 1, so it makes the groups of that step
    await stage.until(lambda: liar.attempts - before == GROUPS * ATTEMPTS and not liar.fake.num_answering)
    honest.may_swap.set()
    await asyncio.to_thread(stage.sender.wait_live, 1, 60, 2)
    assert len(stage.groups) == GROUPS
    liar.may_check.set()
    await stage.until(lambda: len(stage.groups) == 2 * GROUPS)
    for rollout in (rollout for group in stage.groups[GROUPS:] for rollout in group.rollouts):
        assert versions(rollout) == {1}
        assert rollout.probes_missed == (int(rollout.servers[0] == "actor_llm_1"),)
    ledger = read_ledger(run.run_dir)
    assert (ledger.refused, ledger.violations) == ({"actor_llm_1": GROUPS * ATTEMPTS}, ())
    assert [len(group.rollouts) for group in stage.groups] == [ATTEMPTS] * 2 * GROUPS
    await stage.push(2)  # the liar has come back with the whole weights
    await stage.until(lambda: len(stage.groups) == 3 * GROUPS)
    run.trainer.write(TrainingDone(step=10))
    await run.ended()


async def with_held_groups(make_stage: Callable) -> Any:
    """A stage of one server that has answered all groups, and whose probe waits for ``may_check``."""
    stage = await make_stage(1)
    (server,) = stage.servers
    server.may_check.clear()
    await stage.push(0)
    await stage.until(lambda: server.attempts == GROUPS * ATTEMPTS and not server.fake.num_answering)
    return stage


async def test_groups_that_wait_for_a_probe_are_published_by_a_restarted_actor(make_stage: Callable) -> None:
    stage = await with_held_groups(make_stage)
    run, (server,) = stage.run, stage.servers
    answers = run.run_dir / "actor_0" / FOLDER
    await stage.until(lambda: sum(file.stat().st_size > 0 for file in answers.iterdir()) == GROUPS * ATTEMPTS)
    run.stop.set()
    await run.ended()
    assert run.records == []
    run.stop.clear()
    run.begin()
    server.may_check.set()
    await stage.until(lambda: len(stage.groups) == GROUPS)
    assert server.attempts == GROUPS * ATTEMPTS, "the journal has all answers"
    assert [group.dispatch_index for group in sorted(stage.groups, key=lambda group: group.dispatch_index)] == [
        *range(GROUPS)
    ]
    assert ledger_of(run.records, [], 0).violations == ()
    run.trainer.write(TrainingDone(step=10))
    await run.ended()


async def test_server_that_dies_before_its_probe_is_over_holds_up_nobody(make_stage: Callable) -> None:
    stage = await with_held_groups(make_stage)
    run, (server,) = stage.run, stage.servers
    assert stage.groups == []
    run.trainer.write(WeightUpdateSuccess(version=0, servers=()))
    await stage.until(lambda: len(stage.groups) == GROUPS)
    assert not any(isinstance(record, ProbeMissed) for record in run.records)
    server.may_check.set()
    run.trainer.write(TrainingDone(step=10))
    await run.ended()


class Sending:
    """A sender around servers, without an actor."""

    def __init__(self, *servers: ProbedServer):
        self.servers, self.told = servers, list[Any]()
        settings = sender_settings(secret=SECRET, timeout_s=200, probe_tolerance=0.1)
        self.sender = WeightSender(lambda: [server.job for server in servers], settings, self.told.append)
        self.sender.check_with(ProbeText(token_ids=np.zeros((1, 8), dtype=np.int32)))

    def push(self, version: int) -> None:
        wait_until(lambda: self.sender.wait_for_servers(len(self.servers), 60) == len(self.servers))
        weights = {"w": torch.full((64,), float(version))}
        self.sender.send(version, weights.items(), [spec_of(*item) for item in weights.items()])

    def miss(self, server: ProbedServer, *, is_final: bool) -> None:
        """The server misses the probe of version 0. Returns when it is out of service."""
        done = threading.Event()
        miss = ProbeMissed(server=server.job.name, version=0, since=0, is_final=is_final, reason="-")
        assert self.sender._checker is not None
        self.sender._checker.stop_check(miss.server)
        self.sender._loop.call(lambda: (self.sender._queue_miss(miss), done.set()))
        assert done.wait(60)

    def messages_of(self, kind: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]

    def close(self) -> None:
        self.sender.close()
        for server in self.servers:
            server.stop()


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sending]:
    monkeypatch.setenv("PIPELINERL_SECRET", SECRET)
    sending = Sending(ProbedServer("actor_llm_0"), ProbedServer("actor_llm_1"))
    yield sending
    sending.close()


def test_server_that_misses_while_the_announcement_is_written_is_not_told_to_have_left_before_its_miss(
    sending: Sending,
) -> None:
    """Else the actor would take it for a server that died, and publish what waits for its probe."""
    announcements, missed = sending.sender._announcements, sending.servers[0]
    announce, gone = announcements.announce, []

    def announce_late(clients: Any, verified: Any) -> bool:
        if len(announcements.serving) == 2 and not gone:
            gone.append(missed)
            sending.miss(missed, is_final=True)
        return announce(clients, verified)

    announcements.announce = announce_late  # type: ignore[method-assign]
    sending.push(0)
    wait_until(lambda: bool(sending.messages_of(ProbeMissed)))
    before = sending.told[: next(i for i, message in enumerate(sending.told) if isinstance(message, ProbeMissed))]
    named = [missed.job.name in message.servers for message in before if isinstance(message, WeightUpdateSuccess)]
    assert named == sorted(named)
