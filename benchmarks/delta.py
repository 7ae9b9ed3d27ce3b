"""Delta mode beside dense: bytes and time per update of bf16 weights trained with AdamW at several learning rates.

    python -m benchmarks.delta --json benchmarks/delta.json

Trains real float32 master weights on random gradients, casts to bf16, encodes against the previous version, applies on
a second copy, and compares SHA-256 after every update. Times leave out the wire: on one slower than
the break-even rate, delta mode is the faster.
"""

import argparse
import hashlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import machine
from pipelinerl.weights.transfer.delta import apply_delta, encode_delta

LEARNING_RATES = (1e-7, 1e-6, 1e-5, 1e-4)


def digest(buffer: torch.Tensor) -> str:
    return hashlib.sha256(buffer.numpy()).hexdigest()


def measure(num_params: int, learning_rate: float, updates: int, threads: int) -> dict[str, Any]:
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
        payload = encode_delta(trainer, new, threads)
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
    dense, sent, extra_ms = trainer.numel(), statistics.median(sizes), statistics.median(encode_ms)
    extra_ms += statistics.median(apply_ms) - statistics.median(copy_ms)
    return {
        "params": num_params,
        "learning_rate": learning_rate,
        "updates": updates,
        "dense_mb": dense / 1e6,
        "sent_mb": sent / 1e6,
        "ratio": dense / sent,
        "threads": threads,
        "encode_ms": statistics.median(encode_ms),
        "encode_gb_per_s": dense / 1e6 / statistics.median(encode_ms),
        "apply_ms": statistics.median(apply_ms),
        "dense_copy_ms": statistics.median(copy_ms),
        "break_even_mb_per_s": (dense - sent) / 1e3 / extra_ms,
        "sha256_equal": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--params", type=int, default=20_000_000)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="threads of the encoder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(args.params, learning_rate, args.updates, args.threads) for learning_rate in LEARNING_RATES]
    columns = ("lr", "dense MB", "sent MB", "ratio", "encode ms", "apply ms", "copy ms", "even at MB/s")
    print("".join(f"{column:>13}" for column in columns))
    for row in rows:
        times = ("encode_ms", "apply_ms", "dense_copy_ms", "break_even_mb_per_s")
        figures = [row["dense_mb"], row["sent_mb"], row["ratio"], *(row[name] for name in times)]
        print(f"{row['learning_rate']:13.0e}" + "".join(f"{figure:13.1f}" for figure in figures))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
