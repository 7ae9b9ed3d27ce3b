"""Device memory that each further NCCL communicator of two ranks takes. Each rank is a trial of its own."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from pipelinerl.launcher.trial import answer

GROUPS = 3
"""Further communicators, for a median."""
TIMEOUT_S = 60
"""For the other rank: the limit of the whole check."""


def free_bytes(device: torch.device, used: torch.Tensor) -> int:
    dist.barrier()
    torch.cuda.synchronize(device)
    assert used.is_cuda
    return torch.cuda.mem_get_info(device)[0]


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Bytes that the first and each further communicator take, measured after its first collective."""
    rank, meeting = job["rank"], job["meeting"]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    box = torch.ones(1 << 20, device=device)
    before = torch.cuda.mem_get_info(device)[0]
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("nccl", f"file://{meeting}", rank=rank, world_size=2, timeout=timeout)
    dist.all_reduce(box)
    taken = [before - free_bytes(device, box)]
    for _ in range(GROUPS):
        left = free_bytes(device, box)
        dist.all_reduce(box, group=dist.new_group([0, 1], timeout=timeout))
        taken.append(left - free_bytes(device, box))
    dist.destroy_process_group()
    return {"first_bytes": taken[0], "further_bytes": taken[1:], "nccl": ".".join(map(str, nccl.version()))}


if __name__ == "__main__":
    answer(measure)
