"""Time of a micro-batch's forward and backward pass with `finetune.compile` over the time without it, on this CPU.

    python -m benchmarks.compiled_step --json benchmarks/compiled_step.json

Both policies have the shape of `train_step.py`, packed attention, and micro-batches of three lengths. They take turns,
and medians are compared. `compile_s` is the wall time of the first pass over the three, compilation included. On a
shared machine compare CPU time instead: `--clock cpu`.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.train_step import CLOCKS, SETTINGS, Shape, make_model, make_record, timed
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.build import compile_layers
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.model import DTYPES, Policy

DOCUMENTS = (4, 2, 3)


def make_policy(shape: Shape) -> Policy:
    model = make_model(shape)
    model.set_attn_implementation(PACKED)
    return Policy(model, chunk=256)


def make_batches(shape: Shape) -> list[Batch]:
    units = 6 * shape.hidden_size
    rules = BatchRules(
        vocab_size=shape.vocab_size, max_lag_steps=None, layout="packed", tokens_per_attention_unit=units
    )
    length = shape.tokens // shape.documents
    shapes = (Shape(**vars(shape) | {"tokens": count * length, "documents": count}) for count in DOCUMENTS)
    return [prepare_batch(make_record(each), rules, torch.device("cpu")) for each in shapes]


def passes(policy: Policy, batches: list[Batch], dtype: torch.dtype) -> None:
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = policy(batch, SETTINGS)
        output.loss.backward()
        policy.zero_grad(set_to_none=True)


def measure(shape: Shape, dtype: torch.dtype, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    register_attention(PACKED, packed_attention)
    plain, compiled, batches = make_policy(shape), make_policy(shape), make_batches(shape)
    passes(plain, batches, dtype)
    compile_layers(compiled.lm)
    sides = [partial(passes, policy, batches, dtype) for policy in (plain, compiled)]
    compile_s = timed(sides[1], time.perf_counter)
    times = [[timed(side, clock) for side in sides] for _ in range(rounds)]
    plain_s, compiled_s = (statistics.median(side) for side in zip(*times, strict=True))
    return {"compile_s": compile_s, "plain_s": plain_s, "compiled_s": compiled_s, "ratio": compiled_s / plain_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--dtypes", nargs="+", default=sorted(DTYPES), choices=sorted(DTYPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape()
    result = {
        "benchmark": "compiled_step",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": args.rounds,
        "clock": args.clock,
        "shape": vars(shape) | {"documents": DOCUMENTS},
    }
    for name in args.dtypes:
        result[name] = measure(shape, DTYPES[name], args.rounds, CLOCKS[args.clock])
        print(name, json.dumps(result[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
