"""Packed attention per document against one sdpa call under a dense mask, forward and backward of one layer on CPU.

    python -m benchmarks.packed_attention --json benchmarks/packed_attention.json

Both sides take the same queries, keys and values in turn; `ratio` is per document over dense of the same round's
medians. `mask_mb` is what the dense mask alone occupies.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.provenance import machine
from pipelinerl.finetune.attention import announce, packed_attention

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 2, 1, 64
PACKS = {12_288: 8, 32_768: 16}
"""Tokens of a pack and its documents."""


def seconds(function: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> float:
    started = time.process_time()
    torch.autograd.grad(function().sum(), inputs)
    return time.process_time() - started


def measure(tokens: int, documents: int, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    lengths = (tokens // documents,) * documents
    inputs = [torch.randn(1, heads, tokens, SIZE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    numbers = torch.repeat_interleave(torch.arange(documents), torch.tensor(lengths))
    places = torch.arange(tokens)
    mask = (numbers[:, None] == numbers[None]) & (places[:, None] >= places[None])
    announce(lengths, CPU)

    def ours() -> torch.Tensor:
        return packed_attention(torch.nn.Identity(), *inputs, None)[0]  # type: ignore[call-arg]

    def dense() -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, attn_mask=mask[None, None], enable_gqa=True)

    times = [(seconds(ours, inputs), seconds(dense, inputs)) for _ in range(rounds)]
    per_document, masked = (statistics.median(x) for x in zip(*times, strict=True))
    return {
        "tokens": tokens,
        "documents": documents,
        "per_document_cpu_s": per_document,
        "dense_mask_cpu_s": masked,
        "ratio": per_document / masked,
        "mask_mb": mask.numel() / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(tokens, documents, args.rounds) for tokens, documents in PACKS.items()]
    report = {"machine": machine(), "torch": torch.__version__, "results": results}
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
