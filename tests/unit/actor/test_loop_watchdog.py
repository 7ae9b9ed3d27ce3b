"""A domain that blocks its worker's event loop is named, with the line and the cure."""

import asyncio
import functools
import itertools
import logging
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.actor import loop_watchdog
from pipelinerl.actor.loop_watchdog import PACKAGE, UNKNOWN, LoopTimes, LoopWatchdog, blocked_s, busy_s
from pipelinerl.actor.messages import Blocked, Sampling
from pipelinerl.actor.metrics import ActorMetrics, Reporter
from pipelinerl.inspect.finding import found
from pipelinerl.inspect.progress import blocked_loop_lines, blocked_places
from pipelinerl.inspect.why.metrics import METRICS
from pipelinerl.observability.status import RoleStatus, read_statuses
from tests.evidence import evidence
from tests.says import says

LIMIT_S = 0.2
"""In the place of `BLOCKED_S`, which is so long only to tell what matters to a run."""
PAUSE_S = LIMIT_S + 0.9
"""On a busy machine the time for which the looking thread waits for a CPU is taken off."""


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watchdog, "BLOCKED_S", LIMIT_S)


async def sleepy_rollout(*_: Any) -> None:
    time.sleep(PAUSE_S)  # noqa: ASYNC251 - this is what a domain must not do


class Sleepy:
    """A rollout function that is an object."""

    async def __call__(self, *_: Any) -> None:
        time.sleep(PAUSE_S)  # noqa: ASYNC251


async def innocent_rollout(*_: Any) -> None:
    await asyncio.sleep(PAUSE_S)


async def watched(watchdog: LoopWatchdog, *works: Any) -> None:
    """Run the works under the watchdog until its tick after them."""
    watchdog.start()
    await asyncio.gather(*works)
    await asyncio.sleep(0.3)
    watchdog.stop()


async def test_probe_names_domain_line_and_cure_of_a_block(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = LoopWatchdog({"math": sleepy_rollout})
    with caplog.at_level(logging.WARNING, "pipelinerl.actor.loop_watchdog"):
        await watched(watchdog, sleepy_rollout())
    assert watchdog.blocked["math"].seconds > LIMIT_S
    assert watchdog.busy_s >= watchdog.blocked["math"].seconds
    assert (
        watchdog.blocked["math"].where == f"{__file__}:{sleepy_rollout.__code__.co_firstlineno + 1} in sleepy_rollout"
    )
    (record,) = caplog.records
    for part in (
        "event=loop_blocked domain=math times=1",
        "test_loop_watchdog.py",
        "in sleepy_rollout",
        "asyncio.to_thread",
    ):
        assert part in record.getMessage()


async def test_probe_knows_a_rollout_function_that_is_an_object() -> None:
    watchdog = LoopWatchdog({"code": Sleepy()})
    await watched(watchdog, Sleepy()())
    assert set(watchdog.blocked) == {"code"}


async def test_probe_takes_functions_that_have_no_code_of_their_own() -> None:
    """A method, a partial function, and a class of C."""
    watchdog = LoopWatchdog({"method": Sleepy().__call__, "partial": functools.partial(sleepy_rollout, 1), "c": dict})
    watchdog.start()
    watchdog.stop()


async def test_probe_asks_whose_rollout_the_task_is() -> None:
    """Two domains have one function. The block is in the stack's seventh frame, below a library's."""
    watchdog = LoopWatchdog({"gsm": sleepy_rollout, "olympiad": sleepy_rollout}, lambda task: task.get_name())

    async def rollout() -> None:
        subprocess.run(["sleep", str(PAUSE_S)], check=True)  # noqa: ASYNC221

    async with asyncio.TaskGroup() as tasks:
        await watched(watchdog, tasks.create_task(rollout(), name="olympiad"))
    assert set(watchdog.blocked) == {"olympiad"}
    assert watchdog.blocked["olympiad"].where.startswith(f"{__file__}:")
    assert watchdog.blocked["olympiad"].where.endswith(".rollout")


OURS = f"{PACKAGE}render.py"
"""A file of the package in which both functions below are."""


@pytest.mark.parametrize(("awaited", "file"), [(True, OURS), (False, __file__)])
async def test_probe_names_our_line_where_the_domain_awaits_us_and_its_own_where_it_calls(
    awaited: bool, file: str
) -> None:
    """The sleep stands for a library that our code calls."""
    names: dict[str, Any] = {}
    source = "def render(library):\n    library()\n\nasync def generate(library):\n    render(library)\n"
    exec(compile(source, OURS, "exec"), names)

    async def rollout() -> None:
        library = functools.partial(time.sleep, PAUSE_S)
        if awaited:
            await names["generate"](library)
        else:
            names["render"](library)

    watchdog = LoopWatchdog({"math": sleepy_rollout})
    await watched(watchdog, rollout())
    assert watchdog.blocked["math"].where.startswith(f"{file}:")
    assert watchdog.blocked["math"].where.endswith("in render" if awaited else ".rollout")


async def test_probe_names_no_domain_where_two_share_the_file() -> None:
    watchdog = LoopWatchdog({"gsm": sleepy_rollout, "olympiad": sleepy_rollout})
    await watched(watchdog, sleepy_rollout())
    assert set(watchdog.blocked) == {UNKNOWN}


async def test_probe_sees_a_call_that_keeps_the_interpreters_lock() -> None:
    """`sorted` of a list of floats calls no Python code."""
    values = [random.random() for _ in range(1_500_000)]

    async def rollout() -> None:
        for _ in range(3):  # a busy machine may let the watching thread look after the first only
            sorted(values)

    watchdog = LoopWatchdog({"math": sleepy_rollout}, lambda task: "math")
    await watched(watchdog, rollout())
    assert "rollout" in watchdog.blocked["math"].where


def test_probe_of_a_process_that_was_stopped_says_nothing() -> None:
    """Stopped for three times the limit, then made to block: only the block is told."""
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3 * LIMIT_S)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "after the stop: []\n"
        assert process.stdout.readline() == "after a block: ['unknown']\n"


STOPPED = f"""
import asyncio, time
from pipelinerl.actor import loop_watchdog
from pipelinerl.actor.loop_watchdog import LoopWatchdog
loop_watchdog.BLOCKED_S = {LIMIT_S}
async def main():
    watchdog = LoopWatchdog({{}})
    watchdog.start()
    await asyncio.sleep(0.3)
    print("ready", flush=True)
    await asyncio.sleep({3 * LIMIT_S})
    await asyncio.sleep({3 * LIMIT_S})
    print("after the stop:", list(watchdog.blocked), flush=True)
    time.sleep({PAUSE_S})
    await asyncio.sleep(0.3)
    print("after a block:", list(watchdog.blocked), flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("case", "pause_s", "cpu_s", "delay_s", "late_s", "blocked"),
    [
        ("sleeps", 2.0, 0.0, 0.0, 0.0, 2.0),
        ("computes with the lock", 2.0, 2.0, 0.0, 2.0, 2.0),
        ("computes with the lock on half a CPU", 4.0, 2.0, 2.0, 4.0, 2.0),
        ("computes without the lock on half a CPU", 4.0, 2.0, 2.0, 0.5, 2.0),
        ("waits for a CPU", 2.0, 0.1, 1.9, 1.0, 0.1),
        ("waits for a CPU that nobody counts", 2.0, 0.0, 0.0, 1.9, 0.1),
        ("is stopped", 3.0, 0.0, 0.0, 3.0, 0.0),
        ("sleeps, then is stopped", 3.0, 0.0, 0.0, 2.0, 1.0),
    ],
)
def test_block_is_the_pause_less_the_time_in_which_nothing_ran(
    case: str, pause_s: float, cpu_s: float, delay_s: float, late_s: float, blocked: float
) -> None:
    times = LoopTimes(pause_s=pause_s, cpu_s=cpu_s, delay_s=delay_s, late_s=late_s)
    assert blocked_s(times) == pytest.approx(blocked, abs=1e-9), case


@pytest.mark.parametrize(
    ("case", "pause_s", "delay_s", "process_s", "busy"),
    [
        ("waits for servers", 0.0, 0.0, 0.02, 0.02),
        ("many short steps fill the loop", 0.01, 0.0, 0.11, 0.11),
        ("sleeps in the loop, too short to be reported", 0.3, 0.0, 0.0, 0.3),
        ("threads compute on three cores", 0.0, 0.0, 0.3, 0.1),
        ("has a CPU for a quarter of the time", 0.3, 0.3, 0.1, 0.1),
    ],
)
def test_busy_is_what_the_process_computed_or_the_loop_was_blocked_for(
    case: str, pause_s: float, delay_s: float, process_s: float, busy: float
) -> None:
    """A tick is 0.1 s and the pause."""
    times = LoopTimes(pause_s=pause_s, cpu_s=0.0, delay_s=delay_s, late_s=0.0)
    assert busy_s(times, process_s) == pytest.approx(busy, abs=1e-9), case


async def test_probe_says_nothing_of_a_rollout_that_waits() -> None:
    watchdog = LoopWatchdog({"math": innocent_rollout})
    await watched(watchdog, innocent_rollout(), asyncio.to_thread(time.sleep, PAUSE_S))
    assert not {"math"} & set(watchdog.blocked)


async def test_probe_takes_a_thread_without_a_cpu_for_no_block() -> None:
    """The thread was ready for all of the pause: each reading of its delay is ten seconds more."""
    delays = itertools.count(0, 10)
    watchdog = LoopWatchdog({"math": sleepy_rollout}, run_delay_s=lambda thread: next(delays))
    await watched(watchdog, sleepy_rollout())
    assert not watchdog.blocked


async def test_probe_of_code_outside_the_domains_files_says_where(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = LoopWatchdog({"math": asyncio.sleep})
    await watched(watchdog, sleepy_rollout())
    assert set(watchdog.blocked) == {UNKNOWN}
    assert "in sleepy_rollout" in caplog.text


async def test_probe_logs_a_domain_once_and_then_counts(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = LoopWatchdog({"math": sleepy_rollout})
    watchdog.start()
    for _ in range(2):
        await sleepy_rollout()
        await asyncio.sleep(0.3)
    watchdog.stop()
    assert caplog.text.count("event=loop_blocked") == 1
    assert watchdog.blocked["math"].seconds > 2 * LIMIT_S


def test_blocks_of_all_workers_become_a_metric_and_an_alarm(tmp_path: Path) -> None:
    metrics = ActorMetrics(0.0)
    for worker, seconds in ((0, 2.0), (1, 4.0), (0, 5.0)):
        blocked = Blocked(seconds=seconds, where=f"sums.py:{worker + 7} in score")
        metrics.sampling(worker, Sampling(tokens=0, longest=0, ended=0, blocked={"math": blocked}))
    point = metrics.snapshot(1.0)
    assert point["loop_blocked_s/math"] == 9.0
    status = RoleStatus(tmp_path, "actor_0")
    Reporter(metrics, SimpleNamespace(log=lambda values, step: None), status, every_s=60).log(dict, step=4)
    status.close()
    places = blocked_places(read_statuses(tmp_path))
    assert places == {"math": "sums.py:7 in score"}, "worker 0 did so last"
    (alarm,) = found(METRICS, evidence(actor=[{"step": 3}, {"step": 4, **point}], blocked_at=places))
    assert re.search(
        says("blocked event loop (math)", "step 4", "domain math", "9.0 s", "sums.py:7 in score"), alarm.line()
    )
    assert "asyncio.to_thread" in alarm.fix
    (line,) = blocked_loop_lines(point, {"actor_0": status.record()})
    assert re.search(says("domain math", "9 s", "sums.py:7 in score", "event=loop_blocked"), line)
