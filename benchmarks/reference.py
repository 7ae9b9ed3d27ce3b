"""Tokens that a preprocessor's scorer gets scored per second of its own CPU, against a server that answers at once.

    python -m benchmarks.reference --json benchmarks/reference.json

The server is another process and sends packed scores as ours do. Measured in the preprocessor's process: everything
from samples without reference log-probabilities to samples with them.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.provenance import machine
from pipelinerl.preprocess.reference import ReferenceScorer
from pipelinerl.preprocess.samples import Sample
from pipelinerl.records import TrainingSequence
from pipelinerl.testing import FakeServer
from pipelinerl.world import Job

PROMPT_TOKENS = 200


def serve(connection: Connection) -> None:
    async def main() -> None:
        async with FakeServer(lambda *_: []) as server:
            connection.send(server.url)
            await asyncio.to_thread(connection.poll, None)

    uvloop.run(main())


def samples(count: int, length: int) -> list[Sample]:
    """Samples of one sequence each, all but the prompt trained."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(count):
        sequence = TrainingSequence(
            token_ids=rng.integers(0, 1000, length, dtype=np.int32),
            logprobs=np.zeros(length - PROMPT_TOKENS, dtype=np.float32),
            spans=np.array([[PROMPT_TOKENS, length, 0]], dtype=np.int32),
            finish_reason="stop",
        )
        made.append(
            Sample(
                sample_id=str(index),
                group_id="group",
                domain="domain",
                source=(0, index),
                reward=0.0,
                sequences=((0, sequence),),
                num_tokens=length,
            )
        )
    return made


def measure(server: Job, length: int, tokens: int) -> dict[str, float]:
    scorer = ReferenceScorer(lambda: [server], concurrency=64, deadline_s=60)
    try:
        batch = samples(max(1, tokens // length), length)
        scorer.submit(batch[:8]).result()
        cpu, started = time.process_time(), time.perf_counter()
        scored = scorer.submit(batch).result()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - started
    finally:
        scorer.close()
    assert all(one.ref_logprobs is not None and one.drop_reason is None for one in scored)
    return {
        "mtokens_per_cpu_s": round(1e-6 * len(batch) * length / cpu, 2),
        "us_cpu_per_sequence": round(1e6 * cpu / len(batch), 1),
        "mtokens_per_s": round(1e-6 * len(batch) * length / wall, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--tokens", type=int, default=4_000_000)
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    server = Job(name="preprocessor_llm_0", kind="preprocessor_llm", url=ours.recv())
    results: dict[str, Any] = {"machine": machine()}
    for length in (1000, 4000, 8000, 32_000):
        results[str(length)] = measure(server, length, args.tokens)
        print(length, results[str(length)])
    ours.send(None)
    process.join(5)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
