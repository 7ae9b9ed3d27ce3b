"""One rank of a trainer without servers: what the processes of the engine tests do.

Trains the synthetic steps `first … last`, resuming from `load` and saving into `save` at `save_at`, and writes the
metrics of each step (and, at the end, the weights and the dtypes of experts' products) to `out` on rank 0.
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from transformers import AutoTokenizer

from benchmarks.synthetic_batches import make_samples, pack, split_evenly
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.accumulate import train_step
from pipelinerl.finetune.build import make_engine, make_rules
from pipelinerl.finetune.checkpoints import Counters
from pipelinerl.finetune.engines import Engine, read_ranks
from pipelinerl.finetune.learning_rate import learning_rate
from pipelinerl.finetune.proximal import ProximalPolicy
from pipelinerl.finetune.rl.objective import settings_at
from pipelinerl.finetune.saving import Saver, SaveRules
from pipelinerl.records import MicroBatch

SAMPLES, VOCAB, MICRO_BATCHES = 12, 64, 4


def records_of(step: int, rank: int, world_size: int) -> list[MicroBatch]:
    """Rank ``rank``'s share of the step's micro-batches; the whole is the same for every number of ranks."""
    samples = make_samples(0, SAMPLES, vocab_size=VOCAB, lengths=(5, 12), step=step, max_lag=2)
    owners = [number % world_size for number in range(MICRO_BATCHES)]
    records = pack(samples, split_evenly(SAMPLES, MICRO_BATCHES), step, rank_of=owners)
    return [record for record, owner in zip(records, owners, strict=True) if owner == rank]


def make_saver(engine: Engine, run_dir: Path, model: str, proximal: ProximalPolicy) -> Saver:
    rules = SaveRules(run_dir=run_dir, dtype=torch.float32, keep=2, keep_exports=None)
    return Saver(engine, rules, AutoTokenizer.from_pretrained(model), proximal_state=proximal.state)


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, world_size, device = read_ranks(job["accelerator"])
    overrides = [
        "output_dir=unused",
        f"model_path={job['model']}",
        "dataset_loader=a.b",
        "actor.rollout_policy=a.b",
        "finetune.dtype=float32",
        "finetune.learning_rate=1e-2",
        "finetune.gradient_checkpointing=false",
        f"finetune.engine={job['engine']}",
        *job.get("overrides", []),
    ]
    cfg = parse(compose("base", overrides))
    engine = make_engine(cfg, device, world_size)
    multiply, dtypes = torch.nn.functional.grouped_mm, set[str]()

    def grouped_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        product = multiply(*args, **kwargs)
        dtypes.add(str(product.dtype))
        return product

    torch.nn.functional.grouped_mm = grouped_mm
    rules = make_rules(engine, cfg)
    proximal = ProximalPolicy(cfg.proximal_steps, cfg.finetune.max_train_steps)
    if "load" in job:
        saver = make_saver(engine, Path(job["load"]), job["model"], proximal)
        counters = saver.resume()
        assert counters is not None
        if (left_of_block := saver.read_proximal(counters)) is not None:
            proximal.restore(left_of_block, device)
    metrics = []
    for step in range(*job["steps"]):
        sharing = cfg.finetune.seq_parallel
        records = records_of(step, rank // sharing, world_size // sharing)
        settings = settings_at(cfg, step)
        later: Any = SimpleNamespace(peek=partial(records_of, rank=rank // sharing, world_size=world_size // sharing))
        logprobs = proximal.of_step(step, records, later, engine, rules)
        metrics.append(train_step(engine, records, settings, rules, learning_rate(cfg.finetune, step), logprobs))
        if step + 1 == job.get("save_at"):
            saver = make_saver(engine, Path(job["save"]), job["model"], proximal)
            left_of = proximal.made_at if proximal.is_inside_block else None
            saver.start(Counters(step=step + 1, proximal_made_at=left_of), export=True)
    if "save" in job:
        saver.finish()
    weights = {name: tensor.clone() for name, tensor in engine.named_full_parameters()}
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(metrics))
        Path(job["out"]).with_suffix(".experts").write_text(" ".join(sorted(dtypes)))
        save_file(weights, Path(job["out"]).with_suffix(".safetensors"))
    engine.close()


def skip_overflow(job: dict[str, Any]) -> None:
    """Three steps in float16. The gradient of the last rank overflows in the second. Each rank writes what it sees."""
    torch.set_num_threads(1)
    rank, world_size, device = read_ranks("cpu")
    required = ["output_dir=unused", f"model_path={job['model']}", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    cfg = parse(compose("base", [*required, "finetune.dtype=float16", f"finetune.engine={job['engine']}"]))
    engine = make_engine(cfg, device, world_size)
    assert engine.scaling is not None
    engine.scaling.copy_(torch.tensor([2.0**10, 0, 0]))
    engine.loaded(0)
    rules, seen = make_rules(engine, cfg), []
    for step in range(3):
        records = records_of(step, rank, world_size)
        if step == 1 and rank == world_size - 1:
            records = [replace(record, segment_weights=1e30 * record.segment_weights) for record in records]
        train_step(engine, records, settings_at(cfg, step), rules, 1e-2)
        total = sum(float(tensor.double().abs().sum()) for _, tensor in engine.named_full_parameters())
        seen.append([*engine.scaling.tolist(), engine.policy.loss_scale, total])
    Path(f"{job['out']}.{rank}").write_text(json.dumps(seen))
    engine.close()
