"""CPU that spans cost: a worker's and a trainer's with and without them, in turn, in one run.

    python -m benchmarks.tracing --json benchmarks/tracing.json

- `worker`: rollouts of one call through the worker's executor against our route in another process, as in
  ``benchmarks/client.py``, with two spans each. `share` relates the difference to the CPU of worker and server, which
  is what a rollout costs before any token is sampled.
- `trainer`: optimizer steps of 64 sequences on the quickstart's size of a model, a span for every sequence.
- `span`: one span from `record` to the file, of a rollout's size.

CPU time includes the thread that writes. The figures are medians over the turns.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvloop
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import client
from benchmarks.provenance import machine
from benchmarks.synthetic_batches import make_samples, pack, split_evenly
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.finetune.tracing import StepSpans
from pipelinerl.observability import spans

LENGTHS = (8, 1000)
"""Completion tokens: the quickstart's, and a short answer's."""
VOCAB, SEQUENCES, STEPS = 64, 64, 8
SPANS = 20_000


@contextlib.contextmanager
def recording(folder: Path, wanted: bool) -> Iterator[None]:
    """Spans are recorded in the block, or not."""
    if wanted:
        spans.install(spans.SpanWriter(folder / "spans.jsonl", b"benchmark", {"service.name": "benchmark"}, 1 << 26))
    yield
    spans.stop()


def measure_worker(url: str, length: int, seconds: float, turns: int, folder: Path) -> dict[str, Any]:
    cost: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * turns):
        wanted = turn % 2 == 1
        with recording(folder, wanted):
            row = uvloop.run(client.measure(url, length, seconds, join=True))
        cost[wanted].append(row["us_cpu_per_token"] * length)
    return compared(cost, "us_cpu_per_rollout")


def compared(cost: dict[bool, list[float]], name: str) -> dict[str, Any]:
    """Medians without and with spans, and the median of the neighbours' ratios less one."""
    ratios = [on / off for off, on in zip(cost[False], cost[True], strict=True)]
    return {
        f"{name}_off": round(statistics.median(cost[False]), 1),
        f"{name}_on": round(statistics.median(cost[True]), 1),
        "share": round(statistics.median(ratios) - 1.0, 4),
        "turns": len(ratios),
    }


def measure_trainer(turns: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    lm = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_key_value_heads=4, **shape)).train()
    policy = Policy(lm, temperature=1.0, chunk=1024, fp32_head=True)
    rules = BatchRules(vocab_size=VOCAB, max_lag_steps=None, layout="packed", tokens_per_attention_unit=6 * 128)
    samples = make_samples(0, SEQUENCES, vocab_size=VOCAB, lengths=(20, 28), step=4, max_lag=2)
    records = pack(samples, split_evenly(SEQUENCES, 2), 4, ref=False)
    cost: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * turns):
        wanted = turn % 2 == 1
        with recording(folder, wanted):
            started = time.process_time()
            for step in range(STEPS):
                marks = StepSpans(step)
                marks.has_data()
                for record in records:
                    policy(prepare_batch(record, rules, torch.device("cpu")), LossSettings()).loss.backward()
                    marks.micro_batch(record)
                marks.end()
                policy.zero_grad(set_to_none=True)
            spans.stop()
            cost[wanted].append(1e6 * (time.process_time() - started) / STEPS)
    return compared(cost, "us_cpu_per_step")


def measure_span(folder: Path) -> dict[str, float]:
    with recording(folder, True):
        started = time.process_time()
        for number in range(SPANS):
            began = time.time_ns()
            spans.record("rollout", f"0-{number}/3", began, root=True, reward=1.0, evaluation=False)
            if number % 1000 == 0:
                time.sleep(0.01)
        recorded = time.process_time() - started
        spans.stop()
        cpu = time.process_time() - started
    size = (folder / "spans.jsonl").stat().st_size
    (folder / "spans.jsonl").unlink()
    return {
        "us_cpu": round(1e6 * cpu / SPANS, 2),
        "us_cpu_of_caller": round(1e6 * recorded / SPANS, 2),
        "bytes": round(size / SPANS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn of the worker")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found: dict[str, Any] = {"machine": machine()}
        found["span"] = measure_span(folder)
        with client.served() as url:
            found["worker"] = {
                str(length): measure_worker(url, length, args.seconds, args.turns, folder) for length in LENGTHS
            }
        found["trainer"] = measure_trainer(args.turns, folder)
    found["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
