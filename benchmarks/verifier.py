"""Throughput of the verifier and the sandbox: `python benchmarks/verifier.py --json benchmarks/verifier.json`.

Starts the service with its workers in a process of its own, sends simple math checks from one client with many requests
under way, and reports checks per second and the client's own CPU time per check; then judgements per second of trivial
programs in the embedded sandbox.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
from typing import Any

import aiohttp
import uvicorn

from pipelinerl.domains.verifier_client import VerifierClient
from pipelinerl.sandbox import Sandbox
from pipelinerl.verifier.app import create_app

KINDS = {
    "integers": lambda i: (f"so \\boxed{{{i % 100}}}", str(i % 50)),
    "fractions": lambda i: (f"so \\boxed{{\\frac{{{i % 100}}}{{7}}}}", f"{i % 50}/7"),
    "expressions": lambda i: (f"so \\boxed{{x^{{{i % 20 + 2}}} + {i % 7}}}", f"{i % 7} + x^{i % 20 + 2}"),
}


def serve(listener: socket.socket, workers: int) -> None:
    app = create_app(workers=workers, timeout_s=5.0, memory_mb=1024, max_body_kb=1024)
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


async def measure_sandbox(count: int) -> dict[str, Any]:
    """Judgements per second of programs with one and with ten inputs, and of bare interpreters for comparison."""
    sandbox = Sandbox()
    await sandbox.run_python("print(1)", [""])
    results: dict[str, Any] = {"mode": sandbox.mode}
    for inputs in (1, 10):
        programs = max(1, count // inputs)
        started = time.perf_counter()
        outcomes = await asyncio.gather(
            *(sandbox.run_python(f"print(int(input()) + {i})", ["1"] * inputs) for i in range(programs))
        )
        rate = programs / (time.perf_counter() - started)
        lost = sum([run.stdout for run in runs] != [f"{i + 1}\n"] * inputs for i, runs in enumerate(outcomes))
        results[f"{inputs}_inputs"] = {"judgements_per_s": rate, "lost": lost}
    sandbox.close()
    return results | {"bare_interpreters_per_s": await bare_interpreters(count)}


async def bare_interpreters(count: int) -> float:
    """Interpreters that start and end without isolation, as many at a time as there are cores."""
    slots = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def run() -> None:
        async with slots:
            process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", "pass")
            await process.wait()

    started = time.perf_counter()
    await asyncio.gather(*(run() for _ in range(count)))
    return count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--programs", type=int, default=400)
    arguments = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, arguments.workers))
        server.start()
        try:
            verifier = asyncio.run(measure(url, arguments.count, arguments.concurrency, arguments.repeats))
        finally:
            server.terminate()
            server.join()
    results = {
        "machine": {"cpus": len(os.sched_getaffinity(0)), "platform": platform.platform(), "load": os.getloadavg()[0]},
        "workers": arguments.workers,
        "concurrency": arguments.concurrency,
        "verifier": verifier,
        "sandbox": asyncio.run(measure_sandbox(arguments.programs)),
    }
    print(json.dumps(results, indent=2))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
