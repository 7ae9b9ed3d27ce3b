"""Ports for servers that a test starts in another process, which binds its port a while after it was chosen.

The kernel gives a port of its own choice to whoever asks next, so one that was bound and released may be gone. These
are below what the kernel gives away and below the blocks of runs (`pipelinerl.world.network`). Each worker of
pytest-xdist has its share of them, and no port comes twice until all have come.
"""

import itertools
import os
import random
from collections.abc import Iterator

from pipelinerl.world.network import LOWEST_PORT, is_port_free

FIRST_PORT = 10_240
SHARES = 8


def _candidates() -> Iterator[int]:
    size = (LOWEST_PORT - FIRST_PORT) // SHARES
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = range(FIRST_PORT + worker % SHARES * size, FIRST_PORT + (worker % SHARES + 1) * size)
    begin = random.SystemRandom().randrange(size)  # the sessions of other people on this machine begin elsewhere
    return itertools.cycle([*share[begin:], *share[:begin]])


_ports = _candidates()


def free_port() -> int:
    return next(port for port in _ports if is_port_free("", port))
