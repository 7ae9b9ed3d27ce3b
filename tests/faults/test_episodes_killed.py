"""Rollouts of 20 turns outlive the death of worker, actor, launcher and server: no answer that was given is lost.

A rollout's turn under way at a strike is sampled twice, none of the turns before it.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from string import ascii_lowercase
from urllib.parse import unquote

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
from tests.ports import free_port
from tests.struck_roles import Roles, StruckServer

MOMENTS = int(os.environ.get("STRIKES", "200"))
"""Strikes of the slow tests."""
RUN_TIMEOUT_S = 300.0
GIVEN_UP = re.compile(r"event=recorded_answers_given_up file=\S*/(\S+)\.(\d+) ")
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


def num_published(run: Run) -> int:
    """Returns the rollouts that were published."""
    return sum(len(record.rollouts) for record in run.records if isinstance(record, RolloutGroup))


async def asked_more(run: Run, num_asked: Callable[[], int], requests: int, version: int) -> int:
    """Plays the trainer until the server was asked so many times more. Returns the live version."""
    wanted = num_asked() + requests

    def enough() -> bool:
        nonlocal version
        if num_published(run) // BATCH > version:
            version = num_published(run) // BATCH
            run.update(version)
        return num_asked() >= wanted

    await run.until(enough, RUN_TIMEOUT_S)
    return version


def assert_whole(run: Run, strikes: int, given_up: Collection[str] = ()) -> Counter[int]:
    """Checks what must hold of a run that was struck. Returns how many rollouts were played so many times.

    ``given_up``: names of the rollouts that were sampled anew on purpose, after ``MAX_PLAYS`` plays.
    """
    groups = run.records
    assert all(isinstance(record, RolloutGroup) for record in groups)
    assert {len(group.rollouts) for group in groups} == {ATTEMPTS}
    assert len({group.group_id for group in groups}) == len(groups)
    assert sorted(group.dispatch_index for group in groups) == list(range(len(groups)))
    assert all(rollout.num_llm_calls == TURNS and not rollout.diverged for g in groups for rollout in g.rollouts)
    plays = read_plays(run.run_dir)
    assert {name: lost for name in plays if name not in given_up and (lost := sampled_again(plays[name]))} == {}
    interrupted = Counter(len(found) for found in plays.values())
    assert max(interrupted) <= strikes + 1
    from_journal = sum(group.rollouts[i].answers_from_journal for group in groups for i in range(ATTEMPTS))
    assert (from_journal > 0) == (max(interrupted) > 1)
    return interrupted


async def test_rollouts_outlive_their_worker(make_run: Callable) -> None:
    run = await make_run(*AGENT, "max_lag_steps=0", answer=random_answers(0))
    run.start()
    run.update(0)
    await asked_more(run, lambda: len(run.servers[0].requests), BATCH * TURNS // 2, 0)
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


class StruckActor:
    """The actor's process, and the process that stands for the launcher."""

    def __init__(self, run: Run):
        self._run, self.roles = run, Roles("actor", str(run.run_dir))

    async def start(self) -> None:
        self._launcher, self._actor = await self.roles.start()
        self._run.task = asyncio.create_task(self.roles.ended())

    async def kill(self, job: str) -> None:
        """Kills the actor or the launcher, and returns when nothing of both is left."""
        os.kill(self._actor if job == "actor" else self._launcher, signal.SIGKILL)
        if job == "launcher":
            self._terminate()  # as the launcher's reaper does
        await self._run.task  # type: ignore[misc]

    async def end(self) -> None:
        self._terminate()
        assert await self._run.task == [0], self._run.log()[-4000:]  # type: ignore[misc]

    def _terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._actor, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(300 + 20 * MOMENTS)
async def test_rollouts_outlive_actor_launcher_and_server_at_random_moments(make_run: Callable, tmp_path: Path) -> None:
    """One strike of eight comes while the job starts, the others in the midst of answers or of writing them down."""
    rng, strikes = random.Random(1), Counter[str]()
    server = StruckServer(tmp_path, free_port())
    overrides = ("finetune.max_train_steps=100000", "actor.max_request_retries=1000")  # no trainer withdraws a server
    run: Run = await make_run(*AGENT, *overrides, fakes=[server])
    run.open()
    run.update(0)
    actor, version = StruckActor(run), 0
    try:
        await actor.start()
        while strikes.total() < MOMENTS:
            is_early = rng.random() < 1 / 8
            if not is_early:
                version = await asked_more(run, lambda: server.num_sampled, rng.randrange(1, 2 * TURNS), version)
            await asyncio.sleep(rng.uniform(0.0, 1.0 if is_early else 0.05))
            job = rng.choice(("actor", "launcher", "server"))
            strikes[job] += 1
            if job == "server":
                await server.kill()
                await server.start()
            else:
                await actor.kill(job)
                await actor.start()
        await run.until(lambda: num_published(run) == BATCH * (version + 2), RUN_TIMEOUT_S)  # all that were begun
        await actor.end()
    finally:
        await actor.roles.close()
    given_up = {f"{unquote(group)}/{attempt}" for group, attempt in GIVEN_UP.findall(run.log())}
    interrupted = assert_whole(run, MOMENTS, given_up)
    assert max(interrupted) > 1
    assert list((tmp_path / "actor_0" / FOLDER).iterdir()) == []
    played = len(run.records) * ATTEMPTS
    print(f"strikes={dict(strikes)} sampled={server.num_sampled} turns={played * TURNS} {given_up=}")
    print(f"rollouts by plays: {dict(sorted(interrupted.items()))}")
    assert server.num_sampled <= (played + len(given_up)) * TURNS + MOMENTS * 2 * BATCH


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
