"""Throughput of the verifier and the sandbox: `python -m benchmarks.verifier --json benchmarks/verifier.json`.

Starts the service with its workers in a process of its own, sends simple math checks from one client with many requests
under way, and reports checks per second and the client's own CPU time per check; then how long honest answers wait
beside answers that take for ever; then judgements per second of trivial programs in the embedded sandbox.

The waiting is in CPU time, so that other load on the machine does not count: what the pool's workers use between the
arrival of a check and its verdict, divided by the number of workers. So is the sandbox: judgements per second are those
of two cores that do nothing else, from the CPU time of the jail's processes and of this one. What the kernel's own
threads do afterwards, such as the end of a network namespace, is not in it.
"""

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil
import uvicorn

from pipelinerl.config.sections import VerifierSection
from pipelinerl.domains.sandbox import Sandbox
from pipelinerl.domains.verifier.app import create_app
from pipelinerl.domains.verifier.pool import JudgePool
from pipelinerl.domains.verifier_client import VerifierClient
from pipelinerl.records.verdicts import Check

KINDS = {
    "integers": lambda i: (f"so \\boxed{{{i % 100}}}", str(i % 50)),
    "fractions": lambda i: (f"so \\boxed{{\\frac{{{i % 100}}}{{7}}}}", f"{i % 50}/7"),
    "expressions": lambda i: (f"so \\boxed{{x^{{{i % 20 + 2}}} + {i % 7}}}", f"{i % 7} + x^{i % 20 + 2}"),
}
BOMB_TIMEOUT_S = 1.0
"""The limit of a check beside bombs. Every bomb uses all of it."""


def serve(listener: socket.socket, workers: int) -> None:
    app = create_app(VerifierSection(workers=workers, timeout_s=5.0, memory_mb=1024, max_body_kb=1024, judges=[]))
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    asyncio.run(uvicorn.Server(config).serve([listener]))


async def wait_until_up(session: aiohttp.ClientSession, url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
    raise TimeoutError("the verifier did not come up within 120 s")


async def measure(url: str, count: int, concurrency: int, repeats: int) -> dict[str, Any]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await wait_until_up(session, url)
        client = VerifierClient([url])
        slots = asyncio.Semaphore(concurrency)

        async def one(kind: str, index: int) -> None:
            prediction, gold = KINDS[kind](index)
            async with slots:
                await client.check(session, "math", prediction, gold)

        results: dict[str, Any] = {}
        for kind in KINDS:
            rates, cpu = [], []
            for _ in range(repeats):
                started, used = time.perf_counter(), time.process_time()
                await asyncio.gather(*(one(kind, i) for i in range(count)))
                rates.append(count / (time.perf_counter() - started))
                cpu.append(1000 * (time.process_time() - used) / count)
            results[kind] = {
                "checks_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
                "client_cpu_ms_per_check": statistics.median(cpu),
            }
        return results


class WorkersCpu:
    """CPU seconds that the workers of a pool have used together. A worker that is gone keeps its last count."""

    def __init__(self, pool: JudgePool):
        self._pool = pool
        self._used_s: dict[int, float] = {}

    def used_s(self) -> float:
        for worker in list(self._pool._alive):
            with contextlib.suppress(OSError):
                self._used_s[worker.process.pid] = worker.cpu_s
        return sum(self._used_s.values())


def bomb(index: int) -> Check:
    answer = f"\\boxed{{\\sum_{{i=1}}^{{10^{{9}}}} i^{{i+{index}}}}}"
    return Check(kind="math", prediction=answer, gold="42", options={"operators": "allow"})


def honest_check(index: int) -> Check:
    prediction, gold = list(KINDS.values())[index % len(KINDS)](index)
    return Check(kind="math", prediction=prediction, gold=gold)


def p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


async def measure_bombs(workers: int, bombs: int, honest: int) -> dict[str, Any]:
    """How long honest answers wait for a verdict, alone and among bombs that arrive with them in random order."""
    async with JudgePool(workers=workers, timeout_s=BOMB_TIMEOUT_S, memory_mb=1024) as pool:
        cpu = WorkersCpu(pool)
        statuses: Counter[str] = Counter()

        async def judge(check: Check) -> tuple[float, float]:
            started_s, used_s = time.monotonic(), cpu.used_s()
            verdict = await pool.judge(check)
            statuses[verdict.status] += 1
            return (cpu.used_s() - used_s) / workers, time.monotonic() - started_s

        alone = [await judge(honest_check(i)) for i in range(1000, 1000 + honest)]
        statuses.clear()
        checks = [(True, honest_check(i)) for i in range(honest)] + [(False, bomb(i)) for i in range(bombs)]
        Random(0).shuffle(checks)
        waits = await asyncio.gather(*(judge(check) for _, check in checks))
    beside = [wait for (is_honest, _), wait in zip(checks, waits, strict=True) if is_honest]
    return {
        "bombs": bombs,
        "honest": honest,
        "verdicts": dict(statuses),
        "alone_p95_cpu_ms": 1000 * p95([cpu_s * workers for cpu_s, _ in alone]),
        "beside_p95_cpu_ms": 1000 * p95([cpu_s for cpu_s, _ in beside]),
        "beside_p95_wall_ms": 1000 * p95([wall_s for _, wall_s in beside]),
        "load": os.getloadavg()[0],
    }


async def measure_sandbox(count: int) -> dict[str, Any]:
    """Judgements per second of programs with one and with ten inputs, and what the parts of a run cost."""
    sandbox = Sandbox()
    await sandbox.run_python("print(1)", [""])
    results: dict[str, Any] = {"mode": sandbox.mode, "load": os.getloadavg()[0]}
    for inputs in (1, 10):
        programs = max(1, count // inputs)
        used_s = sandbox_cpu_s(sandbox)
        outcomes = await asyncio.gather(
            *(sandbox.run_python(f"print(int(input()) + {i})", ["1"] * inputs) for i in range(programs))
        )
        cpu_s = (sandbox_cpu_s(sandbox) - used_s) / programs
        lost = sum([run.stdout for run in runs] != [f"{i + 1}\n"] * inputs for i, runs in enumerate(outcomes))
        results[f"{inputs}_inputs"] = {
            "cpu_ms_per_judgement": 1000 * cpu_s,
            "judgements_per_s_on_two_cores": 2 / cpu_s,
            "lost": lost,
        }
    sandbox.close()
    return results | {"cpu_ms_of": run_parts(max(10, count // 4))}


def sandbox_cpu_s(sandbox: Sandbox) -> float:
    """CPU seconds of this process, of the sandbox's jail, and of the runs that have ended."""
    assert sandbox._jail is not None, "the first program starts the jail"
    return sum(psutil.Process(sandbox._jail._process.pid).cpu_times()[:4]) + time.process_time()


def run_parts(count: int) -> dict[str, float]:
    """CPU milliseconds of what isolates a run (see `sandbox_parts`)."""
    command = [sys.executable, "-E", "-s", "-B", str(Path(__file__).with_name("sandbox_parts.py")), str(count)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def measure_service(arguments: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, arguments.workers))
        server.start()
        try:
            return asyncio.run(measure(url, arguments.count, arguments.concurrency, arguments.repeats))
        finally:
            server.terminate()
            server.join()


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "verifier": measure_service,
    "beside_bombs": lambda arguments: [
        asyncio.run(measure_bombs(arguments.workers, *map(int, trial.split("+")))) for trial in arguments.bombs
    ],
    "sandbox": lambda arguments: asyncio.run(measure_sandbox(arguments.programs)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the results; the parts that are not measured stay")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bombs", nargs="*", default=["100+100", "30+200"], help="bombs+honest answers of each trial")
    parser.add_argument("--programs", type=int, default=400)
    arguments = parser.parse_args()
    measured = {
        "machine": {"cpus": len(os.sched_getaffinity(0)), "platform": platform.platform(), "load": os.getloadavg()[0]},
        "workers": arguments.workers,
        "concurrency": arguments.concurrency,
    } | {part: PARTS[part](arguments) for part in arguments.parts}
    print(json.dumps(measured, indent=2))
    if arguments.json:
        earlier = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        arguments.json.write_text(json.dumps(earlier | measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
