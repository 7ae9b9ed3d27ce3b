"""Delta mode beside dense: bytes and time per update of bf16 weights trained with AdamW at several learning rates.

    python benchmarks/delta.py --json benchmarks/delta.json

Trains real float32 master weights on random gradients, casts to bf16, encodes against the previous version, applies on
a second copy, and compares SHA-256 after every update. Times are one core's; the wire is left out (see the bytes).
"""

import argparse
import hashlib
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from pipelinerl.weights.delta import apply_delta, encode_delta

LEARNING_RATES = (1e-7, 1e-6, 1e-5, 1e-4)


def digest(buffer: torch.Tensor) -> str:
    return hashlib.sha256(buffer.numpy()).hexdigest()


def measure(num_params: int, learning_rate: float, updates: int) -> dict[str, Any]:
    """Median bytes and times of one learning rate."""
    torch.manual_seed(0)
    master = (torch.randn(num_params) * 0.02).requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=learning_rate, weight_decay=0.0)
    trainer = master.detach().bfloat16().view(torch.uint8)
    server = trainer.clone()
    sizes, encode_ms, apply_ms, copy_ms = [], [], [], []
    for _ in range(updates):
        master.grad = torch.randn(num_params)
        optimizer.step()
        new = master.detach().bfloat16().view(torch.uint8)
        started = time.perf_counter()
        payload = encode_delta(trainer, new)
        encoded = time.perf_counter()
        server.copy_(new) if payload is None else apply_delta(server, payload)
        applied = time.perf_counter()
        torch.empty_like(new).copy_(new)
        copy_ms.append(1e3 * (time.perf_counter() - applied))
        sizes.append(new.numel() if payload is None else payload.numel())
        encode_ms.append(1e3 * (encoded - started))
        apply_ms.append(1e3 * (applied - encoded))
        assert digest(server) == digest(new), "the two ends differ"
        trainer = new
    return {
        "params": num_params,
        "learning_rate": learning_rate,
        "updates": updates,
        "dense_mb": trainer.numel() / 1e6,
        "sent_mb": statistics.median(sizes) / 1e6,
        "ratio": trainer.numel() / statistics.median(sizes),
        "encode_ms": statistics.median(encode_ms),
        "apply_ms": statistics.median(apply_ms),
        "dense_copy_ms": statistics.median(copy_ms),
        "sha256_equal": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--params", type=int, default=20_000_000)
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(args.params, learning_rate, args.updates) for learning_rate in LEARNING_RATES]
    print(f"{'lr':>8} {'dense MB':>9} {'sent MB':>8} {'ratio':>6} {'encode ms':>10} {'apply ms':>9} {'copy ms':>8}")
    for row in rows:
        print(
            f"{row['learning_rate']:8.0e} {row['dense_mb']:9.1f} {row['sent_mb']:8.2f} {row['ratio']:6.1f} "
            f"{row['encode_ms']:10.1f} {row['apply_ms']:9.1f} {row['dense_copy_ms']:8.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"machine": platform.processor(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
