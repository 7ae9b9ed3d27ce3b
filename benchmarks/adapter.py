"""Weight updates of a LoRA run: the adapter alone beside merged weights, on a real CPU server of a tiny model.

    python -m benchmarks.adapter --json benchmarks/adapter.json

Both ways send to the same kind of server (vLLM, float32), which decodes meanwhile. *Push* is the time from the
snapshot until the version is live, *swap* the part of the pause in which weights change. The bytes at the shapes of
published models are computed, as the dry run does it.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.weight_update import SIZES, build_model
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.adapter import adapter_parameters
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.export import exported_parameters
from pipelinerl.finetune.model import Policy, add_adapters
from pipelinerl.plan.memory import version_bytes
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES
from tests.integration.conftest import running_server, save_byte_tokenizer
from tests.sender_kit import Senders
from tests.served import sample

RANK = 16
REQUIRED = ("output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b")
"""Of a configuration."""


def lora(send: str, rank: int) -> tuple[str, ...]:
    return ("finetune.lora.enabled=true", f"finetune.lora.r={rank}", f"finetune.lora.send={send}")


def computed(rank: int) -> Iterator[dict[str, Any]]:
    """Bytes of an update at published shapes."""
    cfgs = [parse(compose("base", [*REQUIRED, *lora(send, rank)])) for send in ("merged", "adapter")]
    for name, shape in PUBLISHED_SHAPES.items():
        if shape.experts == 1:
            merged, adapter = (version_bytes(cfg, shape) for cfg in cfgs)
            yield {"model": name, "rank": rank, "merged_mb": merged / 1e6, "adapter_mb": adapter / 1e6} | {
                "ratio": merged / adapter
            }


def measured(model: Path, send: str, rank: int, updates: int) -> dict[str, Any]:
    """Median of the updates of one server, after the first, which also connects and learns where the bytes go."""
    cfg = parse(compose("base", [*REQUIRED, *lora(send, rank)]))
    lm = add_adapters(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), cfg.finetune.lora, seed=0)
    engine = ReplicatedEngine(Policy(lm, lora_scaling=1.0), cfg, torch.device("cpu"))
    exported = adapter_parameters if send == "adapter" else exported_parameters
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder), model, overrides=lora(send, rank)) as server,
    ):
        senders, stop = Senders(server, timeout_s=60, secret=server.secret), threading.Event()
        load = threading.Thread(target=generate, args=(server.job.url, stop))
        load.start()
        answers, pushes = [], []
        try:
            for version in range(updates + 1):
                weights = dict(exported(engine, torch.float32))
                began = time.perf_counter()
                (outcome,) = senders.send(version, weights).values()
                assert senders.sender.wait_live(version, 60), outcome.error
                pushes.append(1e3 * (time.perf_counter() - began))
                answers.append((outcome.num_bytes, outcome.answer))
        finally:
            stop.set()
            load.join()
            senders.sender.close()
    ended = [answer for _, answer in answers[1:] if answer is not None]
    return {
        "send": send,
        "rank": rank,
        "bytes": answers[-1][0],
        "push_ms": statistics.median(pushes[1:]),
        "swap_ms": statistics.median(answer.swap_ms for answer in ended),
        "pause_ms": statistics.median(answer.pause_ms for answer in ended),
    }


def generate(url: str, stop: threading.Event) -> None:
    while not stop.is_set():
        sample(url, range(40, 60), 100, n=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1M")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, RANK])
    parser.add_argument("--updates", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"computed": [*computed(RANK)], "size": args.size, "updates": args.updates, "measured": []}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        build_model(model, *SIZES[args.size])
        save_byte_tokenizer(model)
        for send, rank in [("merged", RANK), *(("adapter", rank) for rank in args.ranks)]:
            result["measured"].append(measured(model, send, rank, args.updates))
            print(json.dumps(result["measured"][-1]), flush=True)
    for row in result["computed"]:
        print(json.dumps(row))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
