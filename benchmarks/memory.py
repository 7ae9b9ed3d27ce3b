"""Host memory while a model is loaded, by engine and rank count, on this machine's CPU.

    python -m benchmarks.memory --size 100M --engines fsdp2 zero3 --ranks 1 2 --out benchmarks/memory.json

Each rank first loads a tiny model, so that imports and communication buffers do not count. `extra` is the largest of
the ranks' peaks above what is left when the engine stands (its shards): the figure that grows with the model. Mapped
files do not count, for the kernel takes their pages back when it needs them. A process holds one of DeepSpeed's engines
at most, so its ranks first load the tiny model into another engine.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.ranks import run_ranks

RANK_SCRIPT = Path(__file__).with_name("memory_rank.py")
SIZES = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    "20M": {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 9},
    "100M": {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
}
ENGINES = {
    "ddp": ("ddp", []),
    "fsdp2": ("fsdp2", []),
    "zero2": ("deepspeed", ["deepspeed_config=deepspeed_stage2_bf16"]),
    "zero3": ("deepspeed", ["deepspeed_config=deepspeed_stage3_bf16"]),
}
TIMEOUT_S = 500


def save_model(folder: Path, size: str) -> Path:
    """A random bfloat16 model, in files of one layer or so."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    torch.manual_seed(0)
    lm = Qwen2ForCausalLM(Qwen2Config(**SIZES[size], **heads)).bfloat16()
    lm.save_pretrained(folder, max_shard_size="50MB")
    return folder


def layer_bytes(size: str, element: int = 4) -> int:
    """Bytes of the largest unit that is whole at one time: a decoder layer, or an embedding."""
    shape = SIZES[size]
    hidden = shape["hidden_size"]
    layer = 3 * hidden * hidden + 3 * hidden * shape["intermediate_size"]
    return element * max(layer, shape["vocab_size"] * hidden)


def measure(engine: str, ranks: int, model: Path, warm_up: Path, folder: Path) -> list[dict[str, int]]:
    """What each rank saw."""
    name, overrides = ENGINES[engine]
    out = folder / f"{engine}-{ranks}"
    job = {"engine": name, "overrides": overrides, "model": str(model), "warm_up": str(warm_up), "out": str(out)}
    run_ranks(RANK_SCRIPT, [json.dumps(job)], ranks, timeout_s=TIMEOUT_S, env={"MALLOC_ARENA_MAX": "1"})
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


def summarise(engine: str, size: str, model: Path, ranks: list[dict[str, int]]) -> dict[str, Any]:
    """One line of the table; sizes in MB."""
    checkpoint = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    extra = sum(rank["peak"] - rank["after"] for rank in ranks)
    allowed = 0.2 * checkpoint + len(ranks) * layer_bytes(size)
    return {
        "engine": engine,
        "size": size,
        "ranks": len(ranks),
        "checkpoint_mb": round(checkpoint / 1e6, 1),
        "held_mb": round(max(rank["after"] - rank["before"] for rank in ranks) / 1e6, 1),
        "state_mb": round(max(rank["pieces"] for rank in ranks) / 1e6, 1),
        "extra_all_ranks_mb": round(extra / 1e6, 1),
        "allowed_mb": round(allowed / 1e6, 1),
        "within": extra <= allowed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="100M", help="parameters of the model")
    parser.add_argument("--engines", nargs="+", choices=sorted(ENGINES), default=sorted(ENGINES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, warm_up = save_model(folder / "model", args.size), save_model(folder / "tiny", "tiny")
        for engine in args.engines:
            for ranks in args.ranks:
                measured = measure(engine, ranks, model, warm_up, folder)
                results.append(summarise(engine, args.size, model, measured))
                print(json.dumps(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
