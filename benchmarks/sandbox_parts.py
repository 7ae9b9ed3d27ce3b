"""CPU milliseconds of what isolates a run in the sandbox: `python benchmarks/sandbox_parts.py COUNT`, as root.

Prints JSON. Each part is done in a process of its own that a lean interpreter forks, as the jail does. The bare fork is
subtracted from the others. Standard library only, because what is imported makes forks dearer.
"""

import contextlib
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "pipelinerl" / "domains" / "sandbox" / "inside"))

from kernel import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    unshare,
)
from syscalls import CallFilter

REPEATS = 5


def folders() -> None:
    unshare(CLONE_NEWNS)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    for folder in ("/tmp", "/mnt"):
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m")


def process_numbers() -> None:
    unshare(CLONE_NEWPID)
    init = os.fork()
    if init == 0:
        os._exit(0)
    os.waitpid(init, 0)


def forked_cpu_ms(part: Callable[[], Any], count: int) -> float:
    """NaN if this machine does not allow the part."""
    used_s = cpu_s()
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                part()
                os._exit(0)
            os._exit(1)
        if os.waitpid(pid, 0)[1]:
            return math.nan
    return 1000 * (cpu_s() - used_s) / count


def cpu_s() -> float:
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def main() -> None:
    calls = CallFilter()
    parts: dict[str, Callable[[], Any]] = {
        "fork_of_an_interpreter": lambda: None,
        "two_folders_in_memory": folders,
        "process_numbers_and_init": process_numbers,
        "network": lambda: unshare(CLONE_NEWNET),
        "filter_of_system_calls": calls.apply,
    }
    count = int(sys.argv[1])
    rounds = [{name: forked_cpu_ms(part, count) for name, part in parts.items()} for _ in range(REPEATS)]
    costs = {name: statistics.median(costs[name] for costs in rounds) for name in parts}
    bare = costs["fork_of_an_interpreter"]
    print(json.dumps({name: cost if cost is bare else cost - bare for name, cost in costs.items()}))


if __name__ == "__main__":
    main()
