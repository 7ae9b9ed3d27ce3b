"""Rollouts of 20 turns outlive the death of worker, actor, launcher and server: no answer that was given is lost.

A rollout's turn under way at a strike is sampled twice, none of the turns before it.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from string import ascii_lowercase

import psutil
import pytest

from benchmarks.struck_agent import TURNS, read_plays, sampled_again
from benchmarks.struck_run import Strike, run_struck
from pipelinerl.actor.answer_journal import FOLDER
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import RolloutGroup, TrainingDone
from pipelinerl.testing import FakeServer
from tests import struck_worker
from tests.actor_run import ATTEMPTS, BATCH, TOKENIZER, Run, make_runs

MOMENTS = int(os.environ.get("STRIKES", "200"))
"""Strikes of the slow tests."""
AGENT = ("actor.rollout_policy=benchmarks.struck_agent.generate_rollout", "llm.parameters.max_tokens=8")


@pytest.fixture
async def make_run(tmp_path: Path) -> AsyncIterator[Callable]:
    async with make_runs(tmp_path) as make:
        yield make


def random_answers(seed: int) -> Callable:
    rng = random.Random(seed)
    return lambda prompt_ids, params, index: [
        *TOKENIZER.encode("".join(rng.choices(ascii_lowercase, k=6))),
        TOKENIZER.eos_token_id,
    ]


async def asked_more(run: Run, requests: int, version: int) -> int:
    """Plays the trainer until the server was asked so many times more. Returns the live version."""
    wanted = len(run.servers[0].requests) + requests

    def enough() -> bool:
        nonlocal version
        published = sum(len(record.rollouts) for record in run.records if isinstance(record, RolloutGroup))
        if published // BATCH > version:
            version = published // BATCH
            run.update(version)
        return len(run.servers[0].requests) >= wanted

    await run.until(enough)
    return version


def assert_whole(run: Run, strikes: int) -> Counter[int]:
    """Checks what must hold of a run that was struck. Returns how many rollouts were played so many times."""
    groups = run.records
    assert all(isinstance(record, RolloutGroup) for record in groups)
    assert {len(group.rollouts) for group in groups} == {ATTEMPTS}
    assert len({group.group_id for group in groups}) == len(groups)
    assert sorted(group.dispatch_index for group in groups) == list(range(len(groups)))
    assert all(rollout.num_llm_calls == TURNS and not rollout.diverged for g in groups for rollout in g.rollouts)
    plays = read_plays(run.run_dir)
    assert {name: lost for name in plays if (lost := sampled_again(plays[name]))} == {}
    interrupted = Counter(len(found) for found in plays.values())
    assert sum(group.rollouts[i].answers_from_journal for group in groups for i in range(ATTEMPTS)) > 0
    assert max(interrupted) <= strikes + 1
    return interrupted


async def test_rollouts_outlive_their_worker(make_run: Callable) -> None:
    run = await make_run(*AGENT, "max_lag_steps=0", answer=random_answers(0))
    run.start()
    run.update(0)
    await asked_more(run, BATCH * TURNS // 2, 0)
    (worker,) = [process for process in psutil.Process().children() if "spawn_main" in " ".join(process.cmdline())]
    worker.kill()
    await run.until(lambda: len(run.records) == BATCH // ATTEMPTS)
    assert assert_whole(run, strikes=1)[2] > 0
    run.trainer.write(TrainingDone(step=10))
    await run.ended()
    assert list((run.run_dir / "actor_0" / FOLDER).iterdir()) == [], "nothing is left of a run that has ended"


@pytest.mark.slow
@pytest.mark.timeout(60 + 3 * MOMENTS)
async def test_worker_killed_at_any_moment_costs_one_turn_of_each_rollout(tmp_path: Path) -> None:
    """After a random number of answers and then a random time: a kill falls anywhere in a request or a write."""
    rng, groups, kills = random.Random(3), 1, 0
    async with FakeServer(random_answers(3), delay_s=0.002) as server:
        command = ["-m", "tests.struck_worker", str(tmp_path), server.url]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=PIPE, stdout=PIPE)
        assert process.stdin
        assert process.stdout
        while kills < MOMENTS:
            process.stdin.write(f"0-{groups}\n".encode())
            worker = int(await process.stdout.readline())
            ended = asyncio.create_task(process.stdout.readline())
            wanted = len(server.requests) + rng.randrange(50)
            while len(server.requests) < wanted and not ended.done():
                await asyncio.wait([ended], timeout=0.002)
            await asyncio.wait([ended], timeout=rng.uniform(0.0, 0.01))
            if not ended.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            status = int(await ended)
            assert status in (0, signal.SIGKILL)
            kills += status == signal.SIGKILL
            groups += status == 0
        process.stdin.close()
        assert await process.wait() == 0
    plays = read_plays(tmp_path)
    assert {name: lost for name in plays if (lost := sampled_again(plays[name]))} == {}
    sampled = sum(request["sampling_params"].get("n", 1) for request in server.requests)
    print(f"kills={kills} groups={groups} plays={sum(map(len, plays.values()))} {sampled=}")
    assert groups > kills / 20
    assert sampled <= groups * struck_worker.ATTEMPTS * TURNS + kills * struck_worker.ATTEMPTS


class ActorProcess:
    """The actor's process, as the launcher starts it."""

    def __init__(self, run: Run):
        self._run = run

    async def start(self) -> None:
        self._run.stop.clear()
        self._run.task = asyncio.create_task(self._run._role(None))

    async def kill(self) -> None:
        (actor,) = [p for p in psutil.Process().children() if "pipelinerl.actor" in p.cmdline()]
        workers = actor.children(recursive=True)
        actor.kill()
        assert self._run.task is not None
        with contextlib.suppress(AssertionError):
            await self._run.task
        psutil.wait_procs(workers, timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(60 + 30 * MOMENTS)
async def test_rollouts_outlive_an_actor_and_a_server_killed_at_random_moments(make_run: Callable) -> None:
    """One of three strikes is the server's: its connections break, and it comes back a moment later."""
    rng = random.Random(1)
    run = await make_run(*AGENT, "finetune.max_train_steps=100000", answer=random_answers(1))
    server: FakeServer = run.servers[0]
    server.delay_s = 0.02
    run.open()
    actor, version = ActorProcess(run), 0
    await actor.start()
    run.update(0)
    for _ in range(MOMENTS):
        version = await asked_more(run, rng.randrange(1, 8 * TURNS), version)
        if rng.random() < 1 / 3:
            port = int(server.url.rpartition(":")[2])
            await server.stop()
            await server.start(port=port)
        else:
            await actor.kill()
            await actor.start()
    published = len(run.records)
    while len(run.records) < published + 8:
        version = await asked_more(run, 1, version)
    run.stop.set()
    await run.ended()
    interrupted = assert_whole(run, MOMENTS)
    print(f"strikes={MOMENTS} groups={len(run.records)} rollouts by plays: {dict(sorted(interrupted.items()))}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_run_whose_launcher_actor_and_server_are_killed_samples_no_given_answer_again(tmp_path: Path) -> None:
    rng, jobs = random.Random(2), ("actor_0", "actor_llm_0", "launcher")
    moments = max(len(jobs), MOMENTS // 20)
    strikes = [Strike(job=jobs[i % 3], step=2 * i + 2, delay_s=rng.uniform(0.0, 2.0)) for i in range(moments)]
    steps = 2 * moments + 4
    overrides = [
        *AGENT,
        "dataset_loader_params.num_test_problems=16",
        "eval.at_start=false",
        "max_lag_steps=1",
        "actor.rollout_timeout_s=1800",
        "actor.request_timeout_s=600",
        "finetune.save_checkpoint_steps=4",
        "vllm_config.vllm_kwargs.max_model_len=1024",
        "launcher.max_restarts=100",
        "launcher.hang_timeout_s=600",
    ]
    struck = run_struck(tmp_path / "run", strikes, overrides, steps=steps, batch=BATCH, timeout_s=1700.0)
    assert struck.problems == [], struck.output[-4000:]
    assert struck.missed == 0
    plays = read_plays(tmp_path / "run")
    assert {name: lost for name in plays if (lost := sampled_again(plays[name]))} == {}
    again = Counter(len(found) for found in plays.values())
    from_journal = max(point.get("answers_from_journal", 0) for point in read_metrics(tmp_path / "run", "actor"))
    print(f"strikes={len(strikes)} rollouts by plays: {dict(sorted(again.items()))} {from_journal=}")
    assert max(again) > 1
