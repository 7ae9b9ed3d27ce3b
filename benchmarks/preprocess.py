"""How many samples and tokens one core preprocesses: check, advantages, aggregation weights, packing, collation.

    python -m benchmarks.preprocess --json benchmarks/preprocess.json

Groups of 16, prompts of 100–500 and completions of 200–8,000 log-normal tokens; one turn, five turns as five training
sequences, five turns merged into one sequence. Tokens are all tokens of the micro-batches; the process is pinned to one
core and CPU seconds are counted. `from: bytes` adds decoding the groups and encoding the micro-batches.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from benchmarks.provenance import machine
from benchmarks.synthetic_groups import make_groups
from pipelinerl.preprocess.batching import BatchCutter
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.samples import Shaping, prepare_group
from pipelinerl.records import ActorRecord, MicroBatch, RolloutGroup
from pipelinerl.records.check import check_group
from pipelinerl.streams.codec import Codec

SEQ_LENGTH = 16_384
RANKS = 8
VOCAB = 32_000
WORKLOADS = {
    "one_turn": {"turns": 1},
    "five_turns": {"turns": 5},
    "five_turns_merged": {"turns": 5, "merged": True},
}


def preprocess(groups: list[RolloutGroup], shaping: Shaping, collation: Collation, batch_size: int) -> int:
    """Everything between a decoded group and a micro-batch record; returns the tokens of all micro-batches."""
    cutter = BatchCutter(step=1, batch_size=batch_size, max_lag_steps=None)
    tokens = 0
    for offset, group in enumerate(groups):
        check_group(group, vocab_size=VOCAB, attempts=16)
        for sample in prepare_group(offset, group, shaping):
            assert cutter.offer(sample) is None
            if batch := cutter.next_batch():
                tokens += sum(len(mb.token_ids) for rank in collate(batch, collation) for mb in rank)
    return tokens


def through_bytes(payloads: list[bytes], shaping: Shaping, collation: Collation, batch_size: int) -> int:
    """The same from stream bytes to stream bytes."""
    decode, encode = Codec(ActorRecord).decode, Codec(MicroBatch).encode
    cutter = BatchCutter(step=1, batch_size=batch_size, max_lag_steps=None)
    tokens = 0
    for offset, payload in enumerate(payloads):
        group = decode(payload)
        check_group(group, vocab_size=VOCAB, attempts=16)
        for sample in prepare_group(offset, group, shaping):
            assert cutter.offer(sample) is None
            if batch := cutter.next_batch():
                for rank in collate(batch, collation):
                    for micro_batch in rank:
                        encode(micro_batch)
                        tokens += len(micro_batch.token_ids)
    return tokens


def measure(function, *arguments, repeats: int) -> tuple[float, list[float]]:
    """Tokens, and tokens per CPU second of each repeat."""
    rates, tokens = [], 0
    for _ in range(repeats):
        start = time.process_time()
        tokens = function(*arguments)
        rates.append(tokens / (time.process_time() - start))
    return tokens, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--groups", type=int, default=32, help="groups of 16 rollouts; 256 rollouts per optimizer step")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    results = []
    for workload, options in WORKLOADS.items():
        groups = list(make_groups(0, args.groups, vocab_size=VOCAB, **options))
        payloads = [Codec(ActorRecord).encode(group) for group in groups]
        for advantage in ("loo", "batch_std"):
            shaping = Shaping(advantage=advantage, seq_length=SEQ_LENGTH)
            collation = Collation(data_parallel_size=RANKS, seq_length=SEQ_LENGTH, advantage=advantage)
            for name, function, data in (("records", preprocess, groups), ("bytes", through_bytes, payloads)):
                tokens, rates = measure(function, data, shaping, collation, 256, repeats=args.repeats)
                results.append(
                    {
                        "workload": workload,
                        "advantage": advantage,
                        "from": name,
                        "tokens": tokens,
                        "samples": 16 * args.groups,
                        "million_tokens_per_s_median": round(statistics.median(rates) / 1e6, 1),
                        "million_tokens_per_s_min": round(min(rates) / 1e6, 1),
                        "million_tokens_per_s_max": round(max(rates) / 1e6, 1),
                        "samples_per_s_median": round(statistics.median(rates) * 16 * args.groups / tokens),
                    }
                )
                print(json.dumps(results[-1]))
    if args.json:
        document = {"machine": machine(), "core": core, "results": results}
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
