"""Bytes, throughput, latency and idle cost of streams.

    python -m benchmarks.streams --json benchmarks/streams.json

Throughput: one process on one core writes whole records, then reads them back decoded, through the page cache of
``--dir`` and through a redis server of its own. The records are groups of 8 × 2,000 tokens and packed micro-batches of
16,000 tokens with reference log-probs. ``json_lines`` is the same record as one line of JSON, written and read by json.
``fsync`` names the policy; ``segment`` is the default and includes waiting for the disk every 64 MB. Rates are medians
of ``--rounds`` with the smallest and the largest; ``per_cpu_s`` counts the process's CPU time alone.

Latency: from just before ``write`` in one process until ``poll`` has returned the record in another, at random
intervals of 1–20 ms. Idle: CPU seconds per second of a reader that waits for a record that does not come.
"""

import argparse
import json
import multiprocessing
import os
import random
import secrets
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.provenance import machine
from pipelinerl.errors import ConfigError
from pipelinerl.records import MicroBatch, Rollout, RolloutGroup, TrainingSequence, WeightUpdateSuccess
from pipelinerl.streams import SingleStreamSpec, get_streams_backend, open_reader, open_writer, set_streams_backend
from pipelinerl.streams.redis_server import redis_command, redis_config, start_redis, stop_redis

GROUP_TOKENS = 8 * 2000
BATCH_TOKENS = 16_000
IDLE_S = 10.0
BARS = {
    "bytes_per_token group": ("<=", 10),
    "bytes_per_token micro_batch": ("<=", 18),
    "files write group /s": (">=", 2000),
    "files read group /s": (">=", 2000),
    "files write micro_batch /s": (">=", 1000),
    "files read micro_batch /s": (">=", 1000),
    "files read group, times json_lines": (">=", 10),
    "files read micro_batch, times json_lines": (">=", 10),
    "files latency p99 ms": ("<=", 20),
    "redis latency p99 ms": ("<=", 5),
    "files idle core": ("<=", 0.02),
    "redis idle core": ("<=", 0.02),
}


def make_group(rng: np.random.Generator) -> RolloutGroup:
    def rollout(attempt: int) -> Rollout:
        sequence = TrainingSequence(
            token_ids=rng.integers(0, 150_000, 2000, dtype=np.int32),
            logprobs=-rng.random(1800, dtype=np.float32),
            spans=np.array([[200, 900, 6], [900, 2000, 7]], np.int32),
            finish_reason="stop",
        )
        metrics = {"reward": 1.0, "success": 1.0, "no_error": 1.0, "no_answer": 0.0}
        return Rollout(
            attempt=attempt, reward=1.0, sequences=(sequence,), metrics=metrics, latency_s=1.5, num_llm_calls=1
        )

    return RolloutGroup(
        group_id="0-1",
        epoch=0,
        position=1,
        problem_index=5,
        actor=0,
        domain="math",
        dataset="train",
        attempts=8,
        rollouts=tuple(map(rollout, range(8))),
        dispatched_version=6,
        settled_before=0,
        dispatch_index=1,
    )


def make_micro_batch(rng: np.random.Generator) -> MicroBatch:
    starts = np.arange(0, BATCH_TOKENS, 2000, dtype=np.int32)
    return MicroBatch(
        step=7,
        index=0,
        count=2,
        token_ids=rng.integers(0, 150_000, BATCH_TOKENS, dtype=np.int32),
        segment_lengths=np.full(8, 2000, np.int32),
        segment_weights=np.full(8, 1 / 256, np.float32),
        spans=np.stack([starts + 200, starts + 2000, np.full(8, 6, np.int32)], axis=1),
        logprobs=-rng.random(BATCH_TOKENS, dtype=np.float32),
        advantages=rng.standard_normal(BATCH_TOKENS, dtype=np.float32),
        ref_logprobs=-rng.random(BATCH_TOKENS, dtype=np.float32),
        num_samples=256,
        num_tokens=400_000,
        sequence_ids=tuple(f"0-1/{attempt}/0" for attempt in range(8)),
        rewards=np.ones(8, np.float32),
        next_source=(9, 3),
    )


RECORDS: dict[str, tuple[Any, Callable[[np.random.Generator], Any], int]] = {
    "group": (RolloutGroup, make_group, GROUP_TOKENS),
    "micro_batch": (MicroBatch, make_micro_batch, BATCH_TOKENS),
}


class Stopwatch:
    """Rates of repeated measurements, by the wall clock and by CPU time."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @contextmanager
    def measure(self, count: int) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall.append(count / (time.perf_counter() - wall))
        self.cpu.append(count / (time.process_time() - cpu))

    def rates(self) -> dict[str, float]:
        return {
            "per_s": round(statistics.median(self.wall), 1),
            "per_s_min": round(min(self.wall), 1),
            "per_s_max": round(max(self.wall), 1),
            "per_cpu_s": round(statistics.median(self.cpu), 1),
        }


def measure_backend(folder: Path, kind: str, count: int, rounds: int) -> dict[str, Any]:
    """Writes and reads ``count`` records ``rounds`` times on the backend that is set."""
    record_type, make, tokens = RECORDS[kind]
    record = make(np.random.default_rng(0))
    write, read, size = Stopwatch(), Stopwatch(), 0.0
    for turn in range(rounds):
        spec = SingleStreamSpec(folder, kind, instance=turn)
        with write.measure(count), open_writer(spec, record_type) as writer:
            for _ in range(count):
                writer.write(record)
        with read.measure(count), open_reader(spec, record_type, name="bench") as reader:
            assert sum(len(records) for records in iter(lambda reader=reader: reader.poll(0), [])) == count
        size = get_streams_backend().stats(spec).size_bytes / count / tokens
        get_streams_backend().delete(spec)
    return {"bytes_per_token": round(size, 2), "write": write.rates(), "read": read.rates()}


def measure_json_lines(folder: Path, kind: str, count: int, rounds: int) -> dict[str, Any]:
    """The same with one JSON line per record."""
    _, make, tokens = RECORDS[kind]
    record = make(np.random.default_rng(0))
    path = folder / f"{kind}.jsonl"
    write, read = Stopwatch(), Stopwatch()
    for _ in range(rounds):
        with write.measure(count), open(path, "w") as file:
            for _ in range(count):
                file.write(json.dumps(msgspec.to_builtins(record, enc_hook=np.ndarray.tolist)) + "\n")
        with read.measure(count), open(path) as file:
            assert sum(bool(json.loads(line)) for line in file) == count
    size = path.stat().st_size / count / tokens
    path.unlink()
    return {"bytes_per_token": round(size, 2), "write": write.rates(), "read": read.rates()}


def send_stamped(backend: str, options: dict[str, Any], folder: Path, samples: int, ready: Event) -> None:
    """Writes records that carry the time at which they were written."""
    set_streams_backend(backend, **options)  # type: ignore[arg-type]
    rng = random.Random(0)
    ready.wait()
    with open_writer(SingleStreamSpec(folder, "latency"), WeightUpdateSuccess) as writer:
        for version in range(samples):
            time.sleep(rng.uniform(0.001, 0.02))
            writer.write(WeightUpdateSuccess(version=version, servers=("actor_llm_0",), timestamp=time.monotonic()))


def measure_latency(backend: str, options: dict[str, Any], folder: Path, samples: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=send_stamped, args=(backend, options, folder, samples, ready))
    process.start()
    delays: list[float] = []
    with open_reader(SingleStreamSpec(folder, "latency"), WeightUpdateSuccess, name="bench") as reader:
        ready.set()
        while len(delays) < samples:
            records = reader.poll(1.0)
            now = time.monotonic()
            delays += [1000 * (now - record.timestamp) for _, record in records]
            assert records or process.is_alive(), "the writing process ended early"
    process.join()
    p50, p99 = map(float, np.percentile(delays, [50, 99]))
    return {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "max_ms": round(max(delays), 3)}


def measure_idle(folder: Path) -> float:
    """CPU seconds per second of a waiting reader."""
    with open_reader(SingleStreamSpec(folder, "latency"), WeightUpdateSuccess, name="idle") as reader:
        reader.read_all()
        wall, cpu = time.monotonic(), time.process_time()
        reader.poll(IDLE_S)
        return round((time.process_time() - cpu) / (time.monotonic() - wall), 5)


@contextmanager
def redis_options(folder: Path) -> Iterator[dict[str, Any] | None]:
    """A redis server with a password and an append-only file; None where redis-server is not installed."""
    try:
        redis_command()
    except ConfigError as error:
        print(f"without redis: {error}")
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    password = secrets.token_hex(16)
    data = folder / "redis"
    data.mkdir()
    config = redis_config(port=port, data_dir=data, password=password, address=None, fsync="segment", max_record_mb=512)
    process = start_redis(config, subprocess.DEVNULL)
    try:
        yield {"port": port, "password": password, "run_id": "bench"}
    finally:
        stop_redis(process)


def run(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    throughput: dict[str, Any] = {}
    latency: dict[str, Any] = {}
    idle: dict[str, float] = {}
    with redis_options(folder) as redis:
        cases: list[tuple[str, str, dict[str, Any]]] = [
            ("files fsync=never", "files", {"fsync": "never"}),
            ("files", "files", {}),
        ]
        cases += [("redis", "redis", redis)] if redis else []
        for name, backend, options in cases:
            set_streams_backend(backend, **options)  # type: ignore[arg-type]
            if backend == name:
                latency[name] = measure_latency(backend, options, folder, args.latency_samples)
                idle[name] = measure_idle(folder)
            with one_core():
                throughput[name] = {kind: measure_backend(folder, kind, args.count, args.rounds) for kind in RECORDS}
        with one_core():
            throughput["json_lines"] = {
                kind: measure_json_lines(folder, kind, max(args.count // 20, 1), args.rounds) for kind in RECORDS
            }
    return {"throughput": throughput, "latency": latency, "idle_core": idle}


@contextmanager
def one_core() -> Iterator[None]:
    """Pins the process to the last of its cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def compare(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Every bar with its value; rates are those of ``files`` with the default policy."""
    values: dict[str, float] = {}
    for kind in RECORDS:
        files, lines = results["throughput"]["files"][kind], results["throughput"]["json_lines"][kind]
        values[f"bytes_per_token {kind}"] = files["bytes_per_token"]
        values[f"files write {kind} /s"] = files["write"]["per_s"]
        values[f"files read {kind} /s"] = files["read"]["per_s"]
        values[f"files read {kind}, times json_lines"] = round(files["read"]["per_s"] / lines["read"]["per_s"], 1)
    for backend, measured in results["latency"].items():
        values[f"{backend} latency p99 ms"] = measured["p99_ms"]
        values[f"{backend} idle core"] = results["idle_core"][backend]
    return [
        {"bar": f"{name} {relation} {bound}", "value": values[name], "met": met(values[name], relation, bound)}
        for name, (relation, bound) in BARS.items()
        if name in values
    ]


def met(value: float, relation: str, bound: float) -> bool:
    return value <= bound if relation == "<=" else value >= bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--count", type=int, default=1000, help="records per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-samples", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        results = run(Path(folder), args)
    document = {
        "machine": {"cpu": machine(), "cores": os.cpu_count()},
        "load": [round(load, 2) for load in os.getloadavg()],
        "settings": {"count": args.count, "rounds": args.rounds, "latency_samples": args.latency_samples},
        "bars": compare(results),
        **results,
    }
    print(json.dumps(document, indent=2))
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
