"""Optimizer steps of one rank on made-up batches, timed. A trial of its own."""

import statistics
from typing import Any

import numpy as np
import torch

from pipelinerl.config.engine import engine_of
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.accumulate import train_step
from pipelinerl.finetune.build import make_engine, make_rules
from pipelinerl.finetune.engines import read_ranks
from pipelinerl.finetune.rl.objective import settings_at
from pipelinerl.launcher.command_line import quoted
from pipelinerl.launcher.gpu_check.machine import CudaMeter, Meter
from pipelinerl.launcher.trial import answer
from pipelinerl.plan.memory import trainer_items
from pipelinerl.plan.model_shape import find_model_shape
from pipelinerl.records import MicroBatch

NOT_NEEDED = ("output_dir=/nowhere", "dataset_loader=a.b", "actor.rollout_policy=a.b")
DOCUMENTS = 4
"""Documents of a micro-batch."""
MICRO_BATCHES = 2
"""Per optimizer step: with a second one gradients are accumulated."""
WARM_STEPS, TIMED_STEPS = 1, 3
"""The first step compiles kernels and allocates the optimizer's states. The others give a median."""
NOT_TENSORS = ("runtime", "transfer buckets")
"""Items of the plan that are no tensors."""


def made_up_batch(step: int, index: int, tokens: int, vocab: int) -> MicroBatch:
    """A micro-batch of `DOCUMENTS` equal documents, all of whose tokens are trained but the first: MFU counts them."""
    rng = np.random.default_rng((step, index))
    length = tokens // DOCUMENTS
    starts = np.arange(DOCUMENTS, dtype=np.int32) * length
    spans = np.stack([starts + 1, starts + length, np.full(DOCUMENTS, step)], 1).astype(np.int32)
    trained = np.tile(np.arange(length) > 0, DOCUMENTS)
    sampled = np.where(trained, -np.log(vocab), 0.0).astype(np.float32)
    return MicroBatch(
        step=step,
        index=index,
        count=MICRO_BATCHES,
        token_ids=rng.integers(0, vocab, len(trained)).astype(np.int32),
        segment_lengths=np.full(DOCUMENTS, length, dtype=np.int32),
        segment_weights=np.full(DOCUMENTS, 1 / (MICRO_BATCHES * trained.sum()), dtype=np.float32),
        spans=spans,
        logprobs=sampled,
        advantages=np.where(trained, rng.choice([-1.0, 1.0]), 0.0).astype(np.float32),
        ref_logprobs=None,
        num_samples=DOCUMENTS * MICRO_BATCHES,
        num_tokens=int(MICRO_BATCHES * trained.sum()),
        sequence_ids=tuple(f"{step}-{index}/{number}/0" for number in range(DOCUMENTS)),
        rewards=np.zeros(DOCUMENTS, dtype=np.float32),
        next_source=(0, 0),
    )


def time_steps(job: dict[str, Any], meter: Meter, device: torch.device) -> dict[str, Any]:
    """Time and peak memory of the optimizer steps, beside the plan.

    Args:
        job: `model`, `tokens` of a micro-batch, and `overrides` of the configuration.
    """
    tokens, is_cuda = int(job["tokens"]), device.type == "cuda"
    cfg = parse(compose("base", [*NOT_NEEDED, f"model_path={quoted(job['model'])}", *job["overrides"]]))
    engine = make_engine(cfg, device, 1)
    rules, settings = make_rules(engine, cfg), settings_at(cfg, 0)
    vocab, seconds = engine.policy.lm.config.vocab_size, list[float]()
    for step in range(WARM_STEPS + TIMED_STEPS):
        records = [made_up_batch(step, index, tokens, vocab) for index in range(MICRO_BATCHES)]
        if step == WARM_STEPS:
            meter.reset()
        with meter.timed(seconds):
            metrics = train_step(engine, records, settings, rules, 1e-6)
    shape = find_model_shape(job["model"])
    assert shape is not None, "a trial's model has a config.json"
    plan = [item for item in trainer_items(cfg, shape, 1, cuda=is_cuda) if item.label not in NOT_TENSORS]
    step_s = statistics.median(seconds[WARM_STEPS:])
    return {
        "tokens": tokens,
        "document_tokens": tokens // DOCUMENTS,
        "engine": engine_of(cfg, 1),
        "attention": str(engine.policy.lm.config._attn_implementation),  # noqa: SLF001 — has no public name
        "step_s": step_s,
        "first_step_s": seconds[0],
        "tokens_per_s": MICRO_BATCHES * tokens / step_s,
        "loss_is_finite": bool(np.isfinite(float(metrics["loss"]))),  # type: ignore[index]
        "peak_bytes": meter.peak_bytes(),
        "planned_bytes": sum(item.num_bytes for item in plan),
    }


def time_on_device(job: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    _, _, device = read_ranks(job["accelerator"])
    return time_steps(job, CudaMeter(torch.cuda) if device.type == "cuda" else Meter(), device)


if __name__ == "__main__":
    answer(time_on_device)
