"""Peak memory of an optimizer step on this machine's CPU beside what the memory plan says, by engine and model.

    python -m benchmarks.step_memory --engines ddp fsdp2 --out benchmarks/step_memory.json

Random Qwen2 models of the sizes below are trained for two steps of two micro-batches. The plan is that of a CPU: a GPU
multiplies bfloat16 without widening it, and has a runtime's and the transfer's buffers besides. Sizes are bytes that
torch's allocator held (`step_memory_rank.py`).
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.ranks import run_ranks
from benchmarks.step_memory_rank import REQUIRED
from pipelinerl.config.load import compose, parse
from pipelinerl.plan.memory import trainer_items
from pipelinerl.plan.model_shape import find_model_shape

RANK_SCRIPT = Path(__file__).with_name("step_memory_rank.py")
TIMEOUT_S = 500
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
SIZES = {
    "wide": HEADS | {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 3, "vocab_size": 3072},
    "deep": HEADS | {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 10, "vocab_size": 2048},
    "words": HEADS | {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 4, "vocab_size": 12288},
}
"""Fields of a `Qwen2Config`. A micro-batch has as many tokens as the model has positions."""
UNFITTED = {
    "narrow and deep": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 14,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 5120,
        "max_position_embeddings": 640,
    },
    "broad and flat": {
        "hidden_size": 384,
        "intermediate_size": 1056,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "vocab_size": 1280,
        "max_position_embeddings": 1280,
    },
    "many words": {
        "hidden_size": 208,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 16384,
        "max_position_embeddings": 512,
    },
    "broad feed-forward": {
        "hidden_size": 144,
        "intermediate_size": 3024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1536,
        "max_position_embeddings": 1024,
    },
}
"""Sizes that no formula was fitted to, with depths, widths, vocabularies and shares of key heads of their own."""
PRECISIONS = {
    "float32": ("finetune.dtype=float32", "finetune.gradient_checkpointing=false"),
    "bfloat16": ("finetune.gradient_checkpointing=false",),
    "bfloat16, recomputed": ("finetune.gradient_checkpointing=true",),
    "bfloat16, selective": ("finetune.gradient_checkpointing=selective",),
    "float32, adapters": (
        "finetune.dtype=float32",
        "finetune.gradient_checkpointing=false",
        "finetune.lora.enabled=true",
    ),
    "bfloat16, adapters": ("finetune.gradient_checkpointing=false", "finetune.lora.enabled=true"),
}
ENGINES = {
    "ddp": ("finetune.engine=ddp",),
    "fsdp2": ("finetune.engine=fsdp2",),
    **{f"zero{stage}": ("finetune.engine=deepspeed",) for stage in (1, 2, 3)},
}
ZERO_PARAMETERS = 100_000
"""Size of DeepSpeed's buckets here. Those of `conf/deepspeed` are larger than the models."""


def save_model(folder: Path, size: Mapping[str, int]) -> Path:
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**size, tie_word_embeddings=False)).bfloat16().save_pretrained(folder)
    return folder


def save_deepspeed(folder: Path, stage: int) -> Path:
    """DeepSpeed's file of this stage with small buckets. Returns the path without its ending, as the key wants it."""
    small = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters")
    settings = {"stage": stage, "contiguous_gradients": True} | dict.fromkeys(small, ZERO_PARAMETERS)
    settings["stage3_param_persistence_threshold"] = 0
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps({"zero_optimization": settings}))
    return path.with_suffix("")


def measure(cases: Sequence[Sequence[str]], ranks: int, folder: Path) -> list[dict[str, int]]:
    """Peak bytes of rank 0 in each phase, per case."""
    out = folder / "peaks"
    arguments = [json.dumps({"cases": cases, "out": str(out)})]
    path = {"PYTHONPATH": str(RANK_SCRIPT.parents[1])}
    run_ranks(RANK_SCRIPT, arguments, ranks, timeout_s=TIMEOUT_S, env=path)
    return [json.loads(Path(f"{out}.{number}.0").read_text()) for number in range(len(cases))]


def planned(case: Sequence[str], model: Path, ranks: int, *, cuda: bool = False) -> dict[str, int]:
    """The plan's items that are tensors, in bytes. ``cuda``: those of a GPU."""
    shape = find_model_shape(str(model))
    assert shape is not None
    cfg = parse(compose("base", [*REQUIRED, *case]))
    items = trainer_items(cfg, shape, ranks, cuda=cuda)
    return {item.label: item.num_bytes for item in items if item.label not in ("runtime", "transfer buckets")}


def compare(
    engine: str, ranks: int, folder: Path, sizes: Mapping[str, Mapping[str, int]], precisions: Sequence[str]
) -> list[dict[str, Any]]:
    """One line per size and precision: the measured and the planned peak of a step, and their ratio.

    ``sizes``: by name, as `SIZES`.
    """
    stage = int(engine.removeprefix("zero")) if engine.startswith("zero") else 0
    overrides = list(ENGINES[engine])
    if stage:
        overrides.append(f"deepspeed_config={save_deepspeed(folder, stage)}")
    models = {name: save_model(folder / name, size) for name, size in sizes.items()}
    keys = [(name, precision) for name in sizes for precision in precisions]
    tokens = {name: f"finetune.seq_length={size['max_position_embeddings']}" for name, size in sizes.items()}
    cases = [[f"model_path={models[name]}", tokens[name], *overrides, *PRECISIONS[kept]] for name, kept in keys]
    peaks = measure(cases, ranks, Path(tempfile.mkdtemp(dir=folder)))
    lines = []
    for (name, precision), case, peak in zip(keys, cases, peaks, strict=True):
        plan = planned(case, models[name], ranks)
        lines.append(
            {"engine": engine, "ranks": ranks, "size": name, "precision": precision, "plan": plan}
            | {"measured": peak["step"], "ratio": round(sum(plan.values()) / peak["step"], 3)}
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=sorted(ENGINES), default=sorted(ENGINES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES | UNFITTED), default=sorted(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=sorted(PRECISIONS), default=sorted(PRECISIONS))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        for engine in args.engines:
            for ranks in args.ranks:
                sizes = {size: (SIZES | UNFITTED)[size] for size in args.sizes}
                results += compare(engine, ranks, Path(name), sizes, args.precisions)
                for line in results[-len(args.sizes) * len(args.precisions) :]:
                    print(json.dumps({key: line[key] for key in line if key != "plan"}), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
