"""Overhead of a training step over a bare forward+backward with cross-entropy of the same shape.

    python -m benchmarks.train_step --json train_step.json

Both sides run the same model on the same token grid (`packed`, or one document per row) with every token trained. The
bare side materialises the logits and does nothing else; ours checks the record, computes the policy loss with KL and
entropy terms, all diagnostics and the chunked float32 head. Neither includes the optimizer's update. With `--lora` both
train only adapters of all linear layers. The two take turns, and medians are compared. On a shared machine compare CPU
time instead: `--clock cpu`.

With `--imitation` the bare side is a step on rollouts, and ours is the same step on conversations to imitate
(`stage: sft`).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.config.sections import LoraSection
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.diagnostics import StepDiagnostics, step_metrics
from pipelinerl.finetune.model import Policy, add_adapters
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.records import MicroBatch

SETTINGS = LossSettings(policy_loss="reinforce", kl_coef=0.01, entropy_bonus=0.01)
ADAPTERS = LoraSection(enabled=True, send="merged", r=16, alpha=16, dropout=0.0, target_modules="all-linear")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 32_000
    hidden_size: int = 256
    layers: int = 12
    tokens: int = 4096
    documents: int = 8


def make_model(shape: Shape) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config).train()


def make_record(shape: Shape) -> MicroBatch:
    length = shape.tokens // shape.documents
    samples = make_samples(
        0, shape.documents, vocab_size=shape.vocab_size, lengths=(length, length), max_lag=4, step=4, trained=1.0
    )
    return pack(samples, [range(shape.documents)], step=4)[0]


def bare_step(model: Qwen2ForCausalLM, batch: Batch) -> None:
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    labels = batch.input_ids[:, 1:].flatten()
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels).backward()
    model.zero_grad(set_to_none=True)


def our_step(policy: Policy, record: MicroBatch, rules: BatchRules) -> dict[str, float]:
    device = torch.device("cpu")
    diagnostics = StepDiagnostics(device)
    batch = prepare_batch(record, rules, device)
    output = policy(batch, SETTINGS)
    output.loss.backward()
    diagnostics.add(output, batch, SETTINGS)
    metrics = step_metrics(diagnostics.reduce(distributed=False))
    policy.zero_grad(set_to_none=True)
    return metrics


def timed(function: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    function()
    return clock() - started


def measure(
    shape: Shape,
    rows: bool,
    chunk: int,
    rounds: int,
    clock: Callable[[], float],
    *,
    lora: bool = False,
    imitation: bool = False,
) -> dict[str, float]:
    record = make_record(shape)
    rules = BatchRules(
        vocab_size=shape.vocab_size,
        max_lag_steps=None,
        layout="cheaper" if rows else "packed",
        tokens_per_attention_unit=6 * shape.hidden_size,
    )
    models = [make_model(shape) for _ in range(2)]
    if lora:
        models = [add_adapters(model, ADAPTERS, seed=0) for model in models]
    model, policy = models[0], Policy(models[1], chunk=chunk)
    batch = prepare_batch(record, rules, torch.device("cpu"))
    first: Callable[[], object] = partial(bare_step, model, batch)
    if imitation:
        first = partial(our_step, Policy(models[0], chunk=chunk), record, rules)
        every = np.ones(shape.documents, dtype=bool)
        record = msgspec.structs.replace(record, supervised=every)
    bare, ours = [], []
    for _ in range(rounds + 1):
        bare.append(timed(first, clock))
        ours.append(timed(lambda: our_step(policy, record, rules), clock))
    bare, ours = bare[1:], ours[1:]
    return {
        "bare_s": statistics.median(bare),
        "ours_s": statistics.median(ours),
        "ratio": statistics.median(ours) / statistics.median(bare),
        "ratio_of_minima": min(ours) / min(bare),
        "bare_spread_s": max(bare) - min(bare),
        "ours_spread_s": max(ours) - min(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--layouts", nargs="+", default=["packed", "rows"], choices=["packed", "rows"])
    parser.add_argument("--lora", action="store_true", help="train adapters only, on both sides")
    parser.add_argument("--imitation", action="store_true", help="imitation against rollouts, both by our step")
    parser.add_argument("--chunk", type=int, default=256, help="finetune.head_chunk_tokens")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = Shape()
    parameters = sum(p.numel() for p in make_model(shape).parameters())
    result = {
        "benchmark": "train_step",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": args.threads,
        "rounds": args.rounds,
        "clock": args.clock,
        "chunk": args.chunk,
        "lora": args.lora,
        "imitation": args.imitation,
        "shape": vars(shape) | {"parameters": parameters},
    }
    for layout in args.layouts:
        figures = measure(
            shape,
            layout == "rows",
            args.chunk,
            args.rounds,
            CLOCKS[args.clock],
            lora=args.lora,
            imitation=args.imitation,
        )
        result[layout] = figures
        print(f"{layout}: bare {figures['bare_s']:.3f} s, ours {figures['ours_s']:.3f} s, ratio {figures['ratio']:.3f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
