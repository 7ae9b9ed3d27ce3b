"""A rank whose store is called by a thread of C++ too, run as a process by `test_store_watchdog.py`.

    MASTER_ADDR=… MASTER_PORT=… RANK=0 PYTHONPATH=<folder of store_watchdog.so> python watched_rank.py well

Prints how often the thread looked during each kind of work, then ends as asked, and says last whether the process group
still exists when Python is about to end.
"""

import atexit
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from store_watchdog import Watchdog

from pipelinerl.finetune import engines

SECOND = 1.0


def python_alone() -> None:
    deadline, turns = time.monotonic() + SECOND, 0
    while time.monotonic() < deadline:
        turns += 1


def waiting_for_a_peer() -> None:
    if dist.get_rank() == 0:
        time.sleep(SECOND)
    dist.barrier()


def collectives() -> None:
    for _ in range(200):
        dist.all_reduce(torch.ones(1000))


atexit.register(lambda: print(json.dumps({"in a group": dist.is_initialized()}), flush=True))
engines.join_ranks("ddp", 2, torch.device("cpu"), 60.0)
watchdog = Watchdog(dist.PrefixStore("group/", engines._stores[-1]), f"signal of {os.environ['RANK']}")
for work in (python_alone, waiting_for_a_peer, collectives):
    before = watchdog.looks()
    work()
    print(json.dumps({work.__name__: watchdog.looks() - before}), flush=True)
watchdog.stop()
if sys.argv[1] == "error":
    raise SystemExit("this rank gives up")
