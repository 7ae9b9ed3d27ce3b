"""One rank that trains a step and measures the memory of its tensors, run as a process by `step_memory.py` and tests.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python step_memory_rank.py '{"cases": [[…]], "out": …}'

torch's profiler reports every allocation and release of its CPU allocator, so the figures are bytes of tensors and
contain neither Python's objects nor the allocator's slack. A case is a list of overrides of `conf/base.yaml`. Writes to
`out`.<case>.<rank>: the peak bytes of each phase.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.config.engine import engine_of
from pipelinerl.config.environment import RANKS_FILE_VARIABLE
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.accumulate import train_step
from pipelinerl.finetune.build import load_engine, make_rules
from pipelinerl.finetune.engines import join_ranks, read_ranks
from pipelinerl.finetune.export import exported_parameters
from pipelinerl.finetune.model import DTYPES
from pipelinerl.finetune.rl.objective import LossSettings

MICRO_BATCHES = 2
REQUIRED = ("output_dir=unused", "dataset_loader=a.b", "actor.rollout_policy=a.b", "finetune.share_prefixes=off")
"""What every configuration needs, and no prefixes, since the made-up sequences have none in common."""
PHASE = "phase: "


class Allocations:
    """Bytes that torch's CPU allocator holds, phase by phase."""

    def __init__(self) -> None:
        self._existing: list[tuple[str, int, int]] = []

    def __enter__(self) -> "Allocations":
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def add(self, phase: str, tensors: Iterable[torch.Tensor]) -> None:
        """Counts tensors that exist since the end of ``phase``, also those that another thread has made.

        The profiler sees what its own thread does, and transformers loads weights in others.
        """
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        storages = [tensor.untyped_storage() for tensor in local]
        self._existing += [(phase, storage.data_ptr(), storage.nbytes()) for storage in storages]

    def peaks(self) -> dict[str, int]:
        """Largest number of bytes held during each phase, which is a `record_function` of this module."""
        assert self._profile.profiler is not None
        events = list(every_event(self._profile.profiler.kineto_results.experimental_event_tree()))
        spans = {e.name.removeprefix(PHASE): (e.start_time_ns, e.end_time_ns) for e in events if PHASE in e.name}
        blocks = [(e.start_time_ns, e.typed[1].ptr, e.typed[1].alloc_size) for e in events if is_allocation(e)]
        blocks += [(spans[phase][1], address, size) for phase, address, size in self._existing if size]
        return peaks_of(spans, blocks)

    def phase(self, name: str) -> Any:
        return record_function(PHASE + name)


def every_event(roots: Iterable[Any]) -> Iterator[Any]:
    """The profiler's events and all that they contain."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        yield event


def is_allocation(event: Any) -> bool:
    return event.tag == torch._C._profiler._EventType.Allocation


def peaks_of(spans: Mapping[str, tuple[int, int]], blocks: Iterable[tuple[int, int, int]]) -> dict[str, int]:
    """Largest number of bytes held between the two times of each span.

    The profiler sees what its own thread does. Gloo releases tensors in threads of its own, so a block also ends when
    another one gets some of its memory.

    Args:
        blocks: (time, address, bytes) of each allocation, and with negative bytes of each release.
    """
    found, held, live, addresses = dict.fromkeys(spans, 0), 0, dict[int, int](), list[int]()
    for time, address, size in sorted(blocks, key=lambda block: block[0]):
        after = bisect_left(addresses, address + max(size, 1))
        first = after
        while first and addresses[first - 1] + live[addresses[first - 1]] > address:
            first -= 1
        held -= sum(live.pop(ended) for ended in addresses[first:after])
        addresses[first:after] = [address] if size > 0 else []
        if size > 0:
            live[address] = size
            held += size
        for name, (start, end) in spans.items():
            if start <= time <= end:
                found[name] = max(found[name], held)
    return found


class DeviceAllocations:
    """The same of the current GPU, without the workspaces of cuBLAS, which the plan counts as its runtime.

    On Hopper they are 32 MiB for each of the two threads that multiply, the trainer's and autograd's.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}

    def __enter__(self) -> "DeviceAllocations":
        return self

    def __exit__(self, *error: Any) -> None: ...

    def add(self, phase: str, tensors: Iterable[torch.Tensor]) -> None: ...

    def peaks(self) -> dict[str, int]:
        return self._peaks

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        self._peaks[name] = peak - (held - torch.cuda.memory_allocated())


def measure(cfg: Any, world_size: int, rank: int, device: torch.device) -> dict[str, int]:
    """Peak bytes of one rank while it loads the model, in two optimizer steps, and in a weight update."""
    with DeviceAllocations() if device.type == "cuda" else Allocations() as allocations:
        with allocations.phase("loading"):
            engine = load_engine(cfg, device, world_size)
        allocations.add("loading", [*engine.policy.parameters(), *engine.policy.buffers()])
        rules = make_rules(engine, cfg)
        vocab, length = engine.policy.lm.config.vocab_size, cfg.finetune.seq_length
        samples = make_samples(rank, 4 * MICRO_BATCHES, vocab_size=vocab, lengths=(length // 4, length // 4))
        records = pack(samples, [range(4 * i, 4 * i + 4) for i in range(MICRO_BATCHES)])
        for name in ("first step", "step"):
            with allocations.phase(name):
                train_step(engine, records, LossSettings(), rules, 1e-4)
        with allocations.phase("update"):
            for _ in exported_parameters(engine, DTYPES[cfg.finetune.dtype]):
                pass
    return allocations.peaks()


def run_case(job: dict[str, Any], number: int) -> None:
    """Measures one case of the job."""
    rank, world_size, device = read_ranks(job.get("accelerator", "cpu"))
    cfg = parse(compose("base", [*REQUIRED, *job["cases"][number]]))
    os.environ[RANKS_FILE_VARIABLE] = f"{job['out']}.{number}.meeting"
    join_ranks(engine_of(cfg, world_size), world_size, device, 300)
    Path(f"{job['out']}.{number}.{rank}").write_text(json.dumps(measure(cfg, world_size, rank, device)))
    if dist.is_initialized():
        dist.barrier()


def main(job: dict[str, Any]) -> None:
    """Measures each case in a fork of this process, which has imported everything and holds no tensors."""
    torch.set_num_threads(1)
    if any("finetune.engine=deepspeed" in case for case in job["cases"]):
        importlib.import_module("deepspeed")
    for number in range(len(job["cases"])):
        child = multiprocessing.get_context("fork").Process(target=run_case, args=(job, number))
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(f"case {number} ended with {child.exitcode}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
