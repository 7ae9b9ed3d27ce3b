"""CPU that one rollout costs every component, at completions of 1,000, 8,000 and 32,000 tokens.

    python -m benchmarks.ceiling --json benchmarks/ceiling.json

`python -m pipelinerl.plan` computes from these figures what a world needs (``pipelinerl/plan/ceiling.py`` holds them;
a test compares). Groups of eight, every attempt a request of its own.

- `worker`, `server`: the client's and the server's API process, as in ``benchmarks/client.py``.
- `actor`: decodes what a worker sent, encodes the group and appends it to topic `actor` on files.
- `preprocessor`: topic `actor` in, micro-batches out, as bytes, for eight ranks.
- `check`: one judgement of the verifier service, from ``benchmarks/verifier.json``.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks import client
from benchmarks.preprocess import through_bytes
from benchmarks.provenance import machine
from benchmarks.synthetic_groups import group_of, make_sequence
from pipelinerl.actor.messages import FromWorker, RolloutDone
from pipelinerl.preprocess.collate import Collation
from pipelinerl.preprocess.samples import Shaping
from pipelinerl.records import ActorRecord, Rollout, RolloutGroup
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from pipelinerl.streams.codec import Codec

LENGTHS = (1000, 8000, 32_000)
ATTEMPTS = 16
PROMPT = 300


def make_group(rng: np.random.Generator, position: int, length: int) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            attempt=attempt,
            reward=float(rng.integers(0, 2)),
            sequences=(make_sequence(rng, PROMPT, [length]),),
            metrics={},
            latency_s=1.0,
            num_llm_calls=1,
        )
        for attempt in range(ATTEMPTS)
    )
    return group_of(position, rollouts)


def cpu_per_rollout(work: Callable[[], object], rollouts: int, repeats: int = 3) -> float:
    """Milliseconds, the least of the repeats: whatever else runs on the machine only adds."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e3 * min(times) / rollouts


def measure_actor(groups: list[RolloutGroup]) -> float:
    codec: Codec[FromWorker] = Codec(FromWorker)
    messages = [[codec.encode(RolloutDone(task_id=1, rollout=r)) for r in group.rollouts] for group in groups]
    with tempfile.TemporaryDirectory() as folder:
        set_streams_backend("files")
        with open_writer(SingleStreamSpec(Path(folder), "actor"), ActorRecord) as writer:

            def publish() -> None:
                for group, parts in zip(groups, messages, strict=True):
                    decoded = [codec.decode(part) for part in parts]
                    writer.write(msgspec.structs.replace(group, rollouts=tuple(m.rollout for m in decoded)))

            return cpu_per_rollout(publish, ATTEMPTS * len(groups))


def measure_preprocessor(groups: list[RolloutGroup], length: int) -> float:
    seq_length = max(16_384, length + PROMPT)
    payloads = [Codec(ActorRecord).encode(group) for group in groups]
    shaping, collation = (
        Shaping(advantage="loo", seq_length=seq_length),
        Collation(data_parallel_size=8, seq_length=seq_length),
    )
    batch = ATTEMPTS * len(groups)
    return cpu_per_rollout(lambda: through_bytes(payloads, shaping, collation, batch), batch)


def measure_route(seconds: float) -> dict[int, dict[str, float]]:
    found = {}
    with client.served() as url:
        for length in LENGTHS:
            row = uvloop.run(client.measure(url, length, seconds, join=False))
            found[length] = {
                side: row[f"us_{name}_cpu_per_token"] * length / 1e3
                for side, name in (("worker", "client"), ("server", "server"))
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    route = measure_route(args.seconds)
    verifier = json.loads((Path(__file__).parent / "verifier.json").read_text())
    check = 1e3 * verifier["workers"] / verifier["verifier"]["expressions"]["checks_per_s"]["median"]
    costs: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        rng = np.random.default_rng(0)
        groups = [make_group(rng, i, length) for i in range(max(2, 256_000 // (ATTEMPTS * length)))]
        row = {
            **route[length],
            "actor": measure_actor(groups),
            "preprocessor": measure_preprocessor(groups, length),
            "check": check,
        }
        costs[str(length)] = {name: round(value, 3) for name, value in row.items()}
        print(length, costs[str(length)])
    document: dict[str, Any] = {
        "machine": machine(),
        "cpu_ms_per_rollout": costs,
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
