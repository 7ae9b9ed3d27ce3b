"""Where an optimizer step's time goes on a GPU: kernels by kind, beside its speed and its memory against the plan.

    python -m benchmarks.one_card.step --json results/step.json
    python -m benchmarks.one_card.step --models 1.5B:12000 --engines fsdp2 --compile true

Models have random weights. Each setting runs in a process of its own: the steps of `gpu-check`, of which the last one
is recorded by torch's profiler and not timed. `finetune.profile_steps` records the steps of a run. `--accelerator cpu
--models tiny:256` rehearses it.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from benchmarks.provenance import commit, machine
from pipelinerl.launcher.gpu_check.machine import TINY_SHAPE, CudaMeter
from pipelinerl.launcher.gpu_check.trainer_trial import TIMED_STEPS, WARM_STEPS, time_steps
from pipelinerl.launcher.trial import TrialError, TrialTimeoutError, answer, run_trial
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES

SHAPES = {name.rpartition("-")[2]: shape for name, shape in PUBLISHED_SHAPES.items() if "Qwen2.5" in name}
SHAPES["tiny"] = TINY_SHAPE
KINDS = {
    "attention": ("flash", "fmha"),
    "matrix products": ("gemm", "cutlass", "nvjet", "xmma", "::mm", "::addmm", "::bmm"),
    "copies": ("memcpy", "memset"),
    "optimizer": ("multi_tensor", "adam"),
    "collectives": ("nccl",),
    "compiled": ("triton",),
    "reductions": ("reduce", "softmax"),
}
"""Parts of the names of kernels, or of operations on a CPU. The first kind that fits counts."""
OTHERS = "elementwise and others"
TRIAL_S = 300


class Recorder(CudaMeter):
    """Records the operations of the last step instead of timing it."""

    events: Iterable[Any] = ()

    @contextlib.contextmanager
    def timed(self, seconds: list[float]) -> Iterator[None]:
        if len(seconds) < WARM_STEPS + TIMED_STEPS - 1:
            with super().timed(seconds):
                yield
            return
        from torch.profiler import profile

        with profile() as found:
            yield
            self.wait()
        self.events = found.key_averages()


def by_kind(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum times by the kind of what they are named after, the largest sum first."""
    sums: Counter[str] = Counter()
    for name, time in times:
        low = name.lower()
        sums[next((kind for kind, parts in KINDS.items() if any(part in low for part in parts)), OTHERS)] += time
    return dict(sums.most_common())


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One setting. `job`: as of `time_steps`, with `accelerator`."""
    import torch
    from torch.autograd import DeviceType

    from pipelinerl.finetune.engines import read_ranks

    is_cuda = job["accelerator"] == "cuda"
    device = read_ranks(job["accelerator"])[2]
    nothing = SimpleNamespace(reset_peak_memory_stats=int, max_memory_allocated=int, synchronize=int)
    meter = Recorder(torch.cuda if is_cuda else nothing)
    torch.manual_seed(0)
    found = time_steps(job, meter, device)
    events = list(meter.events)
    kernels = [e for e in events if e.device_type == (DeviceType.CUDA if is_cuda else DeviceType.CPU)]
    times = [(e.key, (e.self_device_time_total if is_cuda else e.self_cpu_time_total) / 1e3) for e in kernels]
    return found | {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "kernel_ms": {kind: round(ms, 2) for kind, ms in by_kind(times).items()},
        "busy_ms": round(sum(ms for _, ms in times), 2),
        "launches": sum(e.count for e in events if "LaunchKernel" in e.key),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["1.5B:12000", "3B:12000", "0.5B:32000"], help="SIZE:TOKENS")
    parser.add_argument("--engines", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--compile", nargs="+", default=["false", "true"])
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for model, engine, compiled in product(args.models, args.engines, args.compile):
        size, _, tokens = model.partition(":")
        overrides = [f"finetune.engine={engine}", f"finetune.compile={compiled}", f"finetune.seq_length={tokens}"]
        overrides += ["finetune.share_prefixes=off", "finetune.gradient_checkpointing=true"]  # as in gpu-check
        row: dict[str, Any] = {"model": size, "overrides": overrides}
        with tempfile.TemporaryDirectory() as folder:
            job = {"model": f"{folder}/model", "tokens": int(tokens), "accelerator": args.accelerator}
            made = {"folder": job["model"], "accelerator": args.accelerator, "shape": msgspec.to_builtins(SHAPES[size])}
            try:
                run_trial("-m", "pipelinerl.launcher.gpu_check.trial_model", job=made, timeout_s=TRIAL_S)
                trial = job | {"overrides": overrides}
                row |= run_trial("-m", "benchmarks.one_card.step", "--trial", job=trial, timeout_s=TRIAL_S)
            except (TrialError, TrialTimeoutError) as error:
                row["problem"] = str(error)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            about = {"command": " ".join(sys.argv), "machine": machine(), "commit": commit()}
            args.json.write_text(json.dumps(about | {"steps": rows}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--trial"]:
        answer(measure)
    main()
