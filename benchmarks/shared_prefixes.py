"""Forward and backward passes of an optimizer batch with every common prefix computed once, beside whole sequences.

    python -m benchmarks.shared_prefixes --json benchmarks/shared_prefixes.json
    python -m benchmarks.shared_prefixes --model models/SmolLM2-135M-Instruct --cases 45,23,8 512,32,8 --rollouts 32 \\
        --seq-length 2048 --json benchmarks/shared_prefixes.json

A case is prompt, answer and attempts: tokens of a problem's prompt, mean tokens of an answer (uniform within half of it
on both sides), and attempts at each problem. For each side the batch is packed as the preprocessor packs it and laid
out as the trainer chooses. The two take turns. The grid is computed by a small model, so that its longest cases end;
a prompt of 1 is a first token alone, so nothing is shared. A case that the file has is not measured again.

- `tokens`: of all sequences; `computed`: with prefixes once; `trained`: of the answers;
- `whole_s`, `shared_s`: the fastest of `rounds` passes over the batch; `ratio`: the first over the second.
"""

import argparse
import json
import platform
from collections.abc import Sequence
from functools import partial
from os import getloadavg
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.provenance import commit, machine
from benchmarks.synthetic_batches import SyntheticSample, pack
from benchmarks.train_step import Shape, make_model, our_step, timed
from pipelinerl.finetune.accumulate import BatchRules
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.model import Policy, turn_dropout_off
from pipelinerl.preprocess.packing import plan_packed, plan_shared
from pipelinerl.records import MicroBatch
from pipelinerl.records.prefixes import prefixes_of, sort_by_prefix

Case = tuple[int, int, int]
CASES = [(prompt, answer, n) for prompt in (1, 64, 512, 4096) for answer in (32, 256, 1024) for n in (4, 8, 16)]
CASE_S = 30
"""Seconds after which a case has no further round, so that the grid takes less than half an hour."""
SMALL = "6 layers of 256"


def make_batch(case: Case, rollouts: int, vocab_size: int) -> list[SyntheticSample]:
    """Whole groups of attempts, at least one."""
    prompt, answer, attempts = case
    rng = np.random.default_rng(0)
    found = []
    for problem in range(max(rollouts // attempts, 1)):
        shown = rng.integers(0, vocab_size, prompt)
        for attempt in range(attempts):
            length = prompt + int(rng.integers(answer - answer // 2, answer + answer // 2 + 1))
            is_trained = np.arange(length) >= prompt
            found.append(
                SyntheticSample(
                    token_ids=np.append(shown, rng.integers(0, vocab_size, length - prompt)).astype(np.int32),
                    spans=np.array([[prompt, length, 0]], dtype=np.int32),
                    logprobs=np.where(is_trained, -np.log(vocab_size), 0).astype(np.float32),
                    advantages=np.where(is_trained, rng.normal(), 0).astype(np.float32),
                    ref_logprobs=np.where(is_trained, -np.log(vocab_size), 0).astype(np.float32),
                    weight=1 / rollouts,
                    reward=0.0,
                    name=f"{problem}-{attempt}/0/0",
                )
            )
    return found


def packed(samples: Sequence[SyntheticSample], seq_length: int, *, share: bool) -> list[MicroBatch]:
    lengths = [len(sample.token_ids) for sample in samples]
    untrained = [int(sample.spans[0, 0]) for sample in samples]
    sorted_by_prefix = sort_by_prefix([sample.token_ids for sample in samples])
    whole = partial(plan_packed, lengths, 1, seq_length)
    plan = plan_shared(lengths, untrained, *sorted_by_prefix, 1, seq_length) if share else whole()
    return pack(samples, plan[0])


def measure(lm: PreTrainedModel, case: Case, rollouts: int, seq_length: int, rounds: int) -> dict[str, Any]:
    policy = Policy(lm)
    config = lm.config
    samples = make_batch(case, rollouts, config.vocab_size)
    sides = {name: packed(samples, seq_length, share=name == "shared") for name in ("whole", "shared")}
    rules = {
        name: BatchRules(
            vocab_size=config.vocab_size,
            max_lag_steps=None,
            layout="cheaper",
            dense_mask=False,
            share_prefixes=name == "shared",
            tokens_per_attention_unit=6 * config.hidden_size,
        )
        for name in sides
    }

    def train(name: str) -> None:
        for record in sides[name]:
            our_step(policy, record, rules[name])

    for name in sides:  # the first pass allocates
        our_step(policy, sides[name][0], rules[name])
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    started = perf_counter()
    while len(seconds["whole"]) < rounds and (not seconds["whole"] or perf_counter() - started < CASE_S):
        for name, times in seconds.items():
            times.append(timed(partial(train, name), perf_counter))
    tokens = sum(len(sample.token_ids) for sample in samples)
    shared = sum(int(prefixes_of(record)[1].sum()) for record in sides["shared"])
    whole_s, shared_s = min(seconds["whole"]), min(seconds["shared"])
    return {
        "rollouts": len(samples),
        "seq_length": seq_length,
        "tokens": tokens,
        "computed": tokens - shared,
        "trained": sum(int(np.diff(sample.spans[:, :2]).sum()) for sample in samples),
        "micro_batches": [len(records) for records in sides.values()],
        "rounds": len(seconds["whole"]),
        "whole_s": round(whole_s, 3),
        "shared_s": round(shared_s, 3),
        "ratio": round(whole_s / shared_s, 3),
        "load": round(getloadavg()[0], 1),
        "commit": commit(),
    }


def load(model: Path | None) -> PreTrainedModel:
    register_attention(PACKED, packed_attention)
    if model is None:
        lm: PreTrainedModel = make_model(Shape(layers=6, vocab_size=8_000))
        lm.set_attn_implementation(PACKED)
    else:
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=PACKED)
    turn_dropout_off(lm)
    lm.config.use_cache = False
    return lm.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="add the results here")
    parser.add_argument("--model", type=Path, help="a model's folder. Default: six random layers of 256")
    parser.add_argument("--cases", nargs="+", help="prompt,answer,attempts")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lm = load(args.model)
    cases = CASES
    if args.cases:
        cases = [(int(p), int(a), int(n)) for p, a, n in (case.split(",") for case in args.cases)]
    found = json.loads(args.json.read_text(encoding="utf-8")) if args.json and args.json.is_file() else {}
    results: dict[str, dict[str, dict[str, Any]]] = found.get("results", {})
    for case in cases:
        rows = results.setdefault(f"{args.model.name if args.model else SMALL}, {case[2]} attempts", {})
        name = f"prompt {case[0]}, answers {case[1]}"
        if name in rows:
            continue
        rows[name] = measure(lm, case, args.rollouts, args.seq_length, args.rounds)
        print(case, json.dumps(rows[name]), flush=True)
        if args.json:
            document = {
                "benchmark": "shared_prefixes",
                "python": platform.python_version(),
                "torch": torch.__version__,
                "threads": args.threads,
                "machine": machine(),
                "results": results,
            }
            args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
