"""Settings of the current process: end with its parent, open files, freed memory, and their restoration."""

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from pipelinerl.world import keeper

RESERVED_FILES = 256
"""Open files of a worker besides connections: logs, libraries, data sets, files of a domain."""
MIN_CONNECTIONS = 16
"""Below it the start is refused: a worker would play one group after the other."""
MAX_OPEN_FILES = 2**20
"""More than any role needs. Programs that close every possible descriptor at start take seconds with a higher limit."""


def return_freed_heap() -> None:
    """Give freed blocks of the heap back to the kernel. glibc keeps those of up to 32 MB for later requests."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Asks the kernel to send this process a signal when its parent dies for any reason."""
    parent = os.getppid()
    keeper.prctl(keeper.PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def kept(command: Sequence[str], patience_s: float = math.inf) -> list[str]:
    """Returns the command that runs ``command`` below a keeper, which ends all that it starts (see ``keeper``).

    They also end when the thread that starts it does. (``preexec_fn`` can deadlock: libraries run code after a fork.)

    Args:
        patience_s: seconds from SIGTERM to SIGKILL. By default the keeper only passes signals on.
    """
    return [sys.executable, "-I", "-S", keeper.__file__, str(patience_s), str(os.getpid()), *command]


def raise_open_files() -> int:
    """Raises this process's soft limit on open files to the hard limit or ``MAX_OPEN_FILES``, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def connections_of(open_files: int) -> int:
    """Returns the number of connections that a rollout worker may use with this limit on open files."""
    return max(MIN_CONNECTIONS, (open_files - RESERVED_FILES) // 2)  # as many idle ones may stay open


def files_for(connections: int) -> int:
    """Returns the limit on open files that a rollout worker needs for this number of connections."""
    return RESERVED_FILES + 2 * max(MIN_CONNECTIONS, connections)


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """Puts umask, environment variables, `sys.argv` and the handlers of SIGINT and SIGTERM back on exit."""
    umask = os.umask(0o077)
    os.umask(umask)
    environment, arguments = dict(os.environ), sys.argv
    is_main = threading.current_thread() is threading.main_thread()  # only this thread may set handlers
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield
    finally:
        os.umask(umask)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.argv = arguments
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def own_rank(job_name: str) -> int:
    """Rank of this process in its job: 0 but for the trainer's. For other jobs `RANK` may be a platform's."""
    return int(os.environ.get("RANK", "0")) if job_name.startswith("finetune") else 0
