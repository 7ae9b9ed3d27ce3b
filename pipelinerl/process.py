"""What a process asks of the kernel for itself: to end with its parent, and as many open files as it may have."""

import ctypes
import os
import resource
import signal

PR_SET_PDEATHSIG = 1
MAX_OPEN_FILES = 2**20
"""More than any role needs. Programs that close every possible descriptor at their start take seconds beyond it."""

_libc = ctypes.CDLL(None, use_errno=True)  # here: nothing is loaded between a fork and its exec


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent dies, however it dies. May run between a fork and its exec."""
    parent = os.getppid()
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def raise_open_files() -> int:
    """Raise this process's soft limit on open files to the hard one; return the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
