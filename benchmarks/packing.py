"""How full and how level micro-batches are on log-normal length traces, beside arrival-order next-fit.

    python benchmarks/packing.py --json benchmarks/packing.json

Groups of 16 sequences: a prompt of 100–500 tokens and log-normal completions, the whole clipped to 200–8,000; 16k
tokens per micro-batch, 8 ranks, 256 and 1,024 sequences per optimizer step, means over `--steps` steps.

- `filled`: tokens / (micro-batches × seq_length). All ranks need the same number of micro-batches, so it cannot exceed
- `fillable`: tokens / (ranks × ⌈tokens / (ranks × seq_length)⌉ × seq_length), which the step's tokens alone determine;
- `filled_of_fillable`: the first over the second, what packing decides;
- `rank_imbalance`: largest deviation of a rank's tokens from the mean; the worst step is given too;
- `lockstep`: tokens / (ranks × Σ over rounds of the longest micro-batch).
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pipelinerl.preprocess.metrics import packing_quality
from pipelinerl.preprocess.packing import Plan, plan_packed

SEQ_LENGTH = 16_384
RANKS = 8
GROUP = 16


def trace(rng: np.random.Generator, samples: int, sigma: float) -> list[int]:
    """Lengths of one optimizer step: groups share a prompt and a difficulty."""
    lengths = []
    for _ in range(samples // GROUP):
        prompt = int(rng.integers(100, 501))
        median = 1500 * rng.lognormal(0, 0.3)
        lengths += np.clip(prompt + rng.lognormal(np.log(median), sigma, GROUP), 200, 8000).astype(int).tolist()
    return lengths


def next_fit(lengths: Sequence[int], num_ranks: int, capacity: int) -> Plan:
    """Arrival order: a micro-batch is closed when the next sequence does not fit; ranks take them in turn."""
    slots: list[list[int]] = [[]]
    load = 0
    for i, length in enumerate(lengths):
        if load + length > capacity:
            slots.append([])
            load = 0
        slots[-1].append(i)
        load += length
    slots += [[] for _ in range(-len(slots) % num_ranks)]
    return [slots[rank::num_ranks] for rank in range(num_ranks)]


def evaluate(planner: Callable[..., Plan], samples: int, sigma: float, steps: int) -> dict[str, float]:
    """Means over ``steps`` optimizer steps, and the worst of them."""
    rng = np.random.default_rng(0)
    qualities, fillable, seconds = [], [], 0.0
    for _ in range(steps):
        lengths = trace(rng, samples, sigma)
        start = time.perf_counter()
        plan = planner(lengths, RANKS, SEQ_LENGTH)
        seconds += time.perf_counter() - start
        assert sorted(i for rank in plan for slot in rank for i in slot) == list(range(samples))
        tokens = np.array([[sum(lengths[i] for i in slot) for slot in rank] for rank in plan])
        assert tokens.max() <= SEQ_LENGTH
        qualities.append(packing_quality(tokens, int((tokens == 0).sum()), SEQ_LENGTH))
        rounds = -(-sum(lengths) // (RANKS * SEQ_LENGTH))
        fillable.append(sum(lengths) / (rounds * RANKS * SEQ_LENGTH))
    filled = np.array([q.filled for q in qualities])
    return {
        "filled": filled.mean(),
        "fillable": np.mean(fillable),
        "filled_of_fillable": np.mean(filled / fillable),
        "filled_of_fillable_worst": np.min(filled / fillable),
        "rank_imbalance": np.mean([q.rank_imbalance for q in qualities]),
        "rank_imbalance_worst": max(q.rank_imbalance for q in qualities),
        "lockstep": np.mean([q.lockstep for q in qualities]),
        "lockstep_worst": min(q.lockstep for q in qualities),
        "sentinels": np.mean([q.sentinels for q in qualities]),
        "micro_batches": np.mean([q.micro_batches for q in qualities]),
        "plan_ms": 1000 * seconds / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    results = []
    for samples in (256, 1024):
        for sigma in (0.6, 0.8, 1.0):
            for name, planner in (("pipelinerl", plan_packed), ("next_fit", next_fit)):
                values = evaluate(planner, samples, sigma, args.steps)
                rounded = {key: round(float(value), 5) for key, value in values.items()}
                results.append({"planner": name, "samples": samples, "sigma": sigma, **rounded})
                print(json.dumps(results[-1]))
    if args.json:
        document = {"seq_length": SEQ_LENGTH, "ranks": RANKS, "steps": args.steps, "results": results}
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
