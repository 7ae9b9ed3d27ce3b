"""How full and how level micro-batches are, and how fast they are planned, beside arrival-order next-fit.

    python -m benchmarks.packing --json benchmarks/packing.json

16k tokens per micro-batch, 8 ranks, 256 … 8,192 sequences per optimizer step, means over `--steps` steps. Lengths:

- `lognormal_*`: groups of 16 sequences: a prompt of 100–500 tokens and log-normal completions, clipped to 200–8,000;
- the others are adversarial: two or three sequences fill a slot, none fits beside another, a heavy tail, slots that
  were cut in three and so can be filled to the last token, tens of tokens.

- `filled`: tokens / (micro-batches × seq_length). All ranks need the same number of micro-batches, so it cannot exceed
- `fillable`: tokens / (ranks × ⌈tokens / (ranks × seq_length)⌉ × seq_length), which the step's tokens alone determine;
- `filled_of_fillable`: the first over the second, what packing decides;
- `rank_imbalance`: largest deviation of a rank's tokens from the mean; the worst step is given too;
- `lockstep`: tokens / (ranks × Σ over rounds of the longest micro-batch);
- `mtokens_per_cpu_s`: 10^6 tokens planned per second of CPU; the worst step is given too.

`shared`: groups of `attempts` answers to a prompt that a micro-batch computes once. There, tokens are those computed,
and `computed_share` is their part of all tokens of the sequences.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pipelinerl.preprocess.metrics import packing_quality
from pipelinerl.preprocess.packing import Plan, plan_packed, plan_shared

SEQ_LENGTH = 16_384
RANKS = 8
GROUP = 16


Trace = Callable[[np.random.Generator, int], np.ndarray]


def lognormal(sigma: float) -> Trace:
    """Groups share a prompt and a difficulty."""

    def trace(rng: np.random.Generator, samples: int) -> np.ndarray:
        groups = samples // GROUP
        prompts = rng.integers(100, 501, (groups, 1))
        medians = 1500 * rng.lognormal(0, 0.3, (groups, 1))
        return np.clip(prompts + medians * rng.lognormal(0, sigma, (groups, GROUP)), 200, 8000).astype(int).ravel()

    return trace


def uniform(low: int, high: int) -> Trace:
    return lambda rng, samples: rng.integers(low, high + 1, samples)


def bimodal(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Three in ten nearly fill a slot, the rest are answers of a sentence."""
    long = rng.random(samples) < 0.3
    return np.where(long, rng.integers(12_000, SEQ_LENGTH + 1, samples), rng.integers(50, 400, samples))


def pareto(rng: np.random.Generator, samples: int) -> np.ndarray:
    return np.clip(200 * (1 + rng.pareto(1.1, samples)), 1, SEQ_LENGTH).astype(int)


def cut_in_three(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Parts of full slots: a perfect packing exists."""
    cuts = np.sort(rng.choice(SEQ_LENGTH - 1, (samples // 3, 2)) + 1, axis=1)
    cuts[:, 1] += cuts[:, 0] == cuts[:, 1]
    return np.diff(cuts, prepend=0, append=SEQ_LENGTH).ravel().clip(1)


TRACES: dict[str, Trace] = {
    "lognormal_0.6": lognormal(0.6),
    "lognormal_0.8": lognormal(0.8),
    "lognormal_1.0": lognormal(1.0),
    "uniform_4k_8k": uniform(4000, 8000),
    "uniform_3k_8k": uniform(3000, 8000),
    "uniform_5k_16k": uniform(5000, 16_000),
    "uniform_1_16k": uniform(1, SEQ_LENGTH),
    "halves": uniform(SEQ_LENGTH // 2 - 200, SEQ_LENGTH // 2 + 600),
    "thirds": uniform(SEQ_LENGTH // 3 - 300, SEQ_LENGTH // 3 + 300),
    "full": uniform(SEQ_LENGTH - 100, SEQ_LENGTH),
    "all_6000": uniform(6000, 6000),
    "short": uniform(16, 128),
    "bimodal": bimodal,
    "pareto": pareto,
    "cut_in_three": cut_in_three,
}


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


def evaluate(planner: Callable[..., Plan], trace: Trace, samples: int, steps: int) -> dict[str, float]:
    """Means over ``steps`` optimizer steps, and the worst of them."""
    rng = np.random.default_rng(0)
    qualities, fillable, seconds, rates = [], [], [], []
    for _ in range(steps):
        lengths = np.minimum(trace(rng, samples), SEQ_LENGTH).tolist()
        start = time.process_time()
        plan = planner(lengths, RANKS, SEQ_LENGTH)
        seconds.append(time.process_time() - start)
        rates.append(1e-6 * sum(lengths) / seconds[-1])
        assert sorted(i for rank in plan for slot in rank for i in slot) == list(range(len(lengths)))
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
        "empty": np.mean([q.empty for q in qualities]),
        "micro_batches": np.mean([q.micro_batches for q in qualities]),
        "plan_cpu_ms": 1000 * np.mean(seconds),
        "mtokens_per_cpu_s": np.mean(rates),
        "mtokens_per_cpu_s_worst": np.min(rates),
    }


def evaluate_shared(prompt: int, answer: int, attempts: int, samples: int, steps: int) -> dict[str, float]:
    """The same of groups whose prompts have ``prompt`` tokens, within a half on both sides, and answers alike."""
    rng = np.random.default_rng(0)
    qualities, shares, seconds = [], [], []
    for _ in range(steps):
        prompts = np.repeat(rng.integers(prompt // 2, prompt + prompt // 2 + 1, samples // attempts), attempts)
        lengths = prompts + rng.integers(answer - answer // 2, answer + answer // 2 + 1, len(prompts))
        common = np.where(np.arange(len(prompts)) % attempts, prompts, 0)
        start = time.process_time()
        plan = plan_shared(lengths.tolist(), prompts.tolist(), np.arange(len(prompts)), common, RANKS, SEQ_LENGTH)
        seconds.append(time.process_time() - start)
        answers = lengths - prompts
        tokens = np.array([[answers[s].sum() + _once(prompts, attempts, s) for s in rank] for rank in plan])
        assert tokens.max() <= SEQ_LENGTH
        qualities.append(packing_quality(tokens, int((tokens == 0).sum()), SEQ_LENGTH))
        shares.append(tokens.sum() / lengths.sum())
    return {
        "computed_share": float(np.mean(shares)),
        "rank_imbalance": np.mean([q.rank_imbalance for q in qualities]),
        "rank_imbalance_worst": max(q.rank_imbalance for q in qualities),
        "lockstep": np.mean([q.lockstep for q in qualities]),
        "micro_batches": np.mean([q.micro_batches for q in qualities]),
        "plan_cpu_ms": 1000 * np.mean(seconds),
    }


def _once(prompts: np.ndarray, attempts: int, slot: list[int]) -> int:
    """Tokens of the prompts of a slot, each counted once."""
    return int(prompts[np.unique(np.array(slot, dtype=np.int64) // attempts) * attempts].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    results = []
    for samples in (256, 1024, 2048, 8192):
        for name, trace in TRACES.items():
            for planner_name, planner in (("pipelinerl", plan_packed), ("next_fit", next_fit)):
                values = evaluate(planner, trace, samples, args.steps)
                rounded = {key: round(float(value), 5) for key, value in values.items()}
                results.append({"planner": planner_name, "samples": samples, "lengths": name, **rounded})
                print(json.dumps(results[-1]), flush=True)
    for samples in (64, 512, 4096):
        for prompt, answer, attempts in ((45, 23, 8), (512, 32, 8), (300, 1500, 16), (4000, 500, 8), (4000, 2000, 64)):
            values = evaluate_shared(prompt, answer, attempts, samples, args.steps)
            rounded = {key: round(float(value), 5) for key, value in values.items()}
            case = f"{attempts} answers of {answer} to prompts of {prompt}"
            results.append({"planner": "shared", "samples": samples, "lengths": case, **rounded})
            print(json.dumps(results[-1]), flush=True)
    if args.json:
        document = {"seq_length": SEQ_LENGTH, "ranks": RANKS, "steps": args.steps, "results": results}
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
