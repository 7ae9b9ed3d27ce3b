"""The actor role as a whole: worker processes, topics on disk, a fake server that answers as vLLM does."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from pipelinerl.config.load import load_run
from pipelinerl.errors import DomainError
from pipelinerl.inspect.finding import Finding
from pipelinerl.inspect.status import screen
from pipelinerl.inspect.why.watch import AlarmWatch
from pipelinerl.records import (
    DataOrder,
    EvaluationDone,
    EvaluationStarted,
    GroupDropped,
    OrderResumed,
    RolloutGroup,
    TrainingDone,
    TrainingResumed,
)
from pipelinerl.records.order import DomainOrder, EpochOrder
from pipelinerl.streams.epoch import EVALUATIONS_FILE, StreamEpoch, lost_folder, write_epoch
from tests.actor_run import ATTEMPTS, BATCH, TOKENIZER, make_runs
from tests.says import says


@pytest.fixture
async def make_run(tmp_path: Path) -> AsyncIterator[Callable]:
    async with make_runs(tmp_path) as make:
        yield make


async def test_groups_are_published_whole_and_paced_by_the_version(make_run: Callable) -> None:
    run = await make_run()
    run.start()
    run.update(0)
    # max_lag_steps 1 at version 0: (0 + 1 + 1) × 8 samples = 4 groups of 4.
    await run.until(lambda: len(run.records) == 4)
    run.update(1)
    await run.until(lambda: len(run.records) == 6)
    group = run.records[0]
    assert isinstance(group, RolloutGroup)
    assert [rollout.attempt for rollout in group.rollouts] == [0, 1, 2, 3]
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.0, 0.0]
    sequence = group.rollouts[0].sequences[0]
    (start, end, version) = sequence.spans[0]
    assert (version, end) == (0, len(sequence.token_ids))
    assert TOKENIZER.decode(sequence.token_ids[start:end]).endswith("</answer><|im_end|>")
    assert all(request["sampling_params"]["n"] == ATTEMPTS for request in run.servers[0].requests)
    assert len({record.group_id for record in run.records}) == 6
    run.dropped(8)
    await run.until(lambda: len(run.records) == 8)
    run.trainer.write(TrainingDone(step=10))
    await run.ended()


async def test_evaluation_holds_one_version_before_training_and_at_the_end(make_run: Callable) -> None:
    run = await make_run("eval.at_start=true", "eval.at_end=true", "eval.attempts=2")
    run.start()
    run.update(0)
    await run.until(lambda: len(run.evaluations) == 2)
    started, done = run.evaluations
    assert isinstance(started, EvaluationStarted)
    assert isinstance(done, EvaluationDone)
    assert (started.version, done.version, done.num_rollouts) == (0, 0, 12)
    assert (done.success, done.metrics["test/success"], done.metrics["complete"]) == (0.5, 0.5, 1.0)
    run.update(3)
    run.trainer.write(TrainingDone(step=10))
    await run.ended()
    assert [type(record).__name__ for record in run.evaluations[2:]] == ["EvaluationStarted", "EvaluationDone"]
    assert run.evaluations[-1].version == 3


async def test_evaluation_overtaken_by_weights_begins_again_on_the_new_version(make_run: Callable) -> None:
    run = await make_run("eval.at_start=true")
    run.servers[0].hold.clear()
    run.start()
    run.update(0)
    await run.until(lambda: len(run.evaluations) == 1)
    run.update(1)
    await run.until(lambda: len(run.evaluations) == 2)
    run.servers[0].hold.set()
    await run.until(lambda: len(run.evaluations) == 3)
    assert [record.version for record in run.evaluations] == [0, 1, 1]
    assert isinstance(run.evaluations[-1], EvaluationDone)
    assert run.evaluations[-1].num_rollouts == 6


def wake_ups(processes: list[psutil.Process]) -> int:
    """How often a thread of theirs has slept."""
    texts = [path.read_text() for p in processes for path in Path(f"/proc/{p.pid}/task").glob("*/status")]
    return sum(int(count) for text in texts for count in re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.M))


async def test_idle_actor_and_worker_wait_without_polling(make_run: Callable) -> None:
    """A loop that sleeps for 1 ms would wake up 1000 times per second, one that never sleeps would use a core."""
    run = await make_run()
    run.start()
    run.update(0)
    await run.until(lambda: len(run.records) == 4)
    processes = [psutil.Process(), *psutil.Process().children()]

    def cpu_s() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    began, before, slept = time.monotonic(), cpu_s(), wake_ups(processes)
    await asyncio.sleep(3)
    seconds = time.monotonic() - began
    assert (wake_ups(processes) - slept) / seconds < 300
    assert (cpu_s() - before) / seconds < 0.5


async def test_dead_server_costs_no_rollout(make_run: Callable) -> None:
    run = await make_run(servers=2)
    for server in run.servers:
        server.delay_s = 0.2
    run.start()
    run.update(0)
    await run.until(lambda: all(server.requests for server in run.servers))
    await run.servers[1].stop()
    await run.until(lambda: len(run.records) == 4)
    assert all(isinstance(record, RolloutGroup) and len(record.rollouts) == ATTEMPTS for record in run.records)


async def test_server_out_of_service_gives_its_requests_back_at_once(make_run: Callable) -> None:
    run = await make_run(servers=2)
    run.servers[1].hold.clear()
    run.start()
    run.update(0)
    await run.until(lambda: bool(run.servers[1].requests))
    run.update(0, 0)
    await run.until(lambda: len(run.records) == 4)
    assert all(isinstance(record, RolloutGroup) for record in run.records)


async def test_restarted_actor_continues_behind_its_last_published_group(make_run: Callable) -> None:
    run = await make_run("++dataset_loader_params.max_number=4", "max_lag_steps=3")  # 19 or so problems
    run.start()
    run.update(0)
    await run.until(lambda: len(run.records) == 8)
    run.servers[0].hold.clear()
    run.update(4)  # room for 8 more groups, whose answers never come
    await run.until(lambda: len(run.servers[0].requests) > 8)
    run.stop.set()
    await run.ended()
    assert len(run.records) == 8
    run.servers[0].hold.set()
    run.stop.clear()
    run.begin()
    await run.until(lambda: len(run.records) == 16)
    places = sorted((record.epoch, record.position) for record in run.records)
    problems = len([1 for place in places if place[0] == 0])
    assert places == [(0, i) for i in range(problems)] + [(1, i) for i in range(16 - problems)]
    assert sorted(record.dispatch_index for record in run.records) == list(range(16))
    assert len({record.group_id for record in run.records}) == 16
    run.update(5)
    await run.until(lambda: len(run.records) == 18)


async def test_actor_on_new_streams_goes_on_behind_the_checkpoint(make_run: Callable, tmp_path: Path) -> None:
    run = await make_run()
    write_epoch(tmp_path, StreamEpoch(number=2))
    lost = lost_folder(tmp_path, 1)
    lost.mkdir(parents=True)
    result = EvaluationDone(version=0, success=0.5, reward=0.5, num_rollouts=6, metrics={})
    (lost / EVALUATIONS_FILE).write_bytes(msgspec.json.encode(result) + b"\n")
    resolved = DomainOrder(samples=3 * BATCH, epochs={0: EpochOrder(size=66, settled=((0, 5), (6, 7)))})
    order = DataOrder(domains={"largest": resolved})
    run.start()
    run.trainer.write(TrainingResumed(step=3, repeated=1, samples_processed=3 * BATCH, orders={0: order}))
    run.update(3)
    await run.until(lambda: sum(isinstance(r, RolloutGroup) for r in run.records) >= 2 * BATCH // ATTEMPTS)
    first, *groups = run.records
    assert first == OrderResumed(step=3, order=order, published=3 * BATCH)
    positions = sorted(group.position for group in groups)
    assert positions == [5, *range(7, 6 + len(groups))], "what is resolved does not come again, all else in its order"
    assert all(group.dispatched_version == 3 for group in groups)
    assert run.evaluations == [result]


@pytest.mark.slow
async def test_frozen_worker_is_replaced_and_its_groups_are_tried_again(make_run: Callable) -> None:
    run = await make_run("launcher.heartbeat_timeout_s=15")
    run.servers[0].hold.clear()
    run.start()
    run.update(0)
    await run.until(lambda: bool(run.servers[0].requests))
    (worker,) = [process for process in psutil.Process().children() if "spawn_main" in " ".join(process.cmdline())]
    worker.suspend()
    run.servers[0].hold.set()
    await run.until(lambda: len(run.records) == 4)
    assert not worker.is_running()
    assert all(isinstance(record, RolloutGroup) and len(record.rollouts) == ATTEMPTS for record in run.records)


@pytest.fixture
def domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    def write(body: str) -> str:
        (tmp_path / "user_domain.py").write_text(
            "import os\nfrom pipelinerl.async_llm import llm_async_generate, make_training_text\n"
            "from pipelinerl.llm import Prompt\nfrom pipelinerl.rollouts import BaseMetrics, RolloutResult\n"
            "async def generate_rollout(cfg, llm, problem, session):\n" + body
        )
        monkeypatch.syspath_prepend(tmp_path)
        return "actor.rollout_policy=user_domain.generate_rollout"

    return write


async def test_domain_sees_the_jobs_of_the_run_and_ends_the_role_with_its_name_if_it_always_raises(
    make_run: Callable, domain: Callable
) -> None:
    body = "    raise ValueError(f'jobs: {[job.name for job in cfg.jobs]}')\n"
    run = await make_run(domain(body), "actor.max_domain_errors=10")
    run.start()
    run.update(0)
    jobs = r"jobs: \['actor_0', 'actor_llm_0', 'finetune_0'\]"
    with pytest.raises(DomainError, match=rf"user_domain.generate_rollout raised ValueError: {jobs}.*problem: \{{"):
        await run.ended()


async def test_domain_that_returns_something_else_is_a_domain_error(make_run: Callable, domain: Callable) -> None:
    run = await make_run(domain("    return {'reward': 1}\n"), "actor.max_domain_errors=10")
    run.start()
    run.update(0)
    with pytest.raises(DomainError, match=says("dict", "pipelinerl.rollouts.RolloutResult")):
        await run.ended()


async def test_domain_that_blocks_its_worker_is_named_with_its_line_and_a_cure(
    make_run: Callable, domain: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A problem of each group blocks in a module beside the domain's, seven frames below it in a library."""
    (tmp_path / "scoring.py").write_text(
        "import subprocess\n\ndef score():\n    subprocess.run(['sleep', '0.8'], check=True)\n"
    )
    rollout = domain(
        "    from pipelinerl.domains.largest import generate_rollout as good\n"
        "    import scoring\n"
        "    result = await good(cfg, llm, problem, session)\n"
        "    if result.metrics.success: scoring.score()\n"
        "    return result\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    run = await make_run(rollout, "actor.log_every_s=1")
    run.start_process()
    run.update(0)
    watch = AlarmWatch(run.run_dir, load_run(run.run_dir), every_s=0)
    alarms: list[Finding] = []

    place = f"{tmp_path}/scoring.py:4 in score"

    def alarmed() -> bool:
        alarms.extend(alarm for alarm in watch.new() if f"last at {place}" in alarm.evidence)
        return bool(alarms)

    await run.until(alarmed, 200)
    assert "has blocked its rollout workers for" in alarms[0].evidence
    assert "await asyncio.to_thread(" in alarms[0].fix
    assert f"at={place} " in run.log()
    assert any(place in line for line in screen(run.run_dir))


async def test_problem_that_kills_the_worker_is_dropped_as_poisonous(make_run: Callable, domain: Callable) -> None:
    run = await make_run(
        domain(
            "    from pipelinerl.domains.largest import generate_rollout as good\n"
            "    if problem['answer'] == 12: os._exit(7)\n"
            "    return await good(cfg, llm, problem, session)\n"
        ),
        "actor.max_group_reissues=1",
        "max_lag_steps=0",
    )
    run.start()
    run.update(0)
    await run.until(lambda: sum(isinstance(record, RolloutGroup) for record in run.records) == 2)
    dropped = [record for record in run.records if isinstance(record, GroupDropped)]
    assert {record.reason for record in dropped} <= {"poisonous"}


async def test_numbers_beyond_the_bound_cost_their_rollouts_and_not_the_actor(
    make_run: Callable, domain: Callable
) -> None:
    """Metrics square them: a reward of 1e300 ended the actor until its restarts were used up."""
    run = await make_run(
        domain(
            "    from pipelinerl.domains.largest import generate_rollout as good\n"
            "    result = await good(cfg, llm, problem, session)\n"
            "    if problem['answer'] == 12: result.metrics.reward = 1e300\n"
            "    return result\n"
        ),
        "actor.log_every_s=0.1",
        "actor.max_domain_errors=100000",
    )
    run.start()
    run.update(0)
    await run.until(lambda: {RolloutGroup, GroupDropped} <= {type(record) for record in run.records}, 200)
    assert {record.reason for record in run.records if isinstance(record, GroupDropped)} == {"domain_error"}
