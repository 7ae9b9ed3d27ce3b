"""Kernel settings of the current process: end together with the parent, and raise the limit on open files."""

import ctypes
import os
import resource
import signal

PR_SET_PDEATHSIG = 1
MAX_OPEN_FILES = 2**20
"""More than any role needs. Programs that close every possible descriptor at start take seconds with a higher limit."""

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here, because nothing may be loaded between fork and exec


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Asks the kernel to send this process a signal when its parent dies for any reason.

    May run between a fork and its exec.
    """
    parent = os.getppid()
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def raise_open_files() -> int:
    """Raises this process's soft limit on open files to the hard limit, at most ``MAX_OPEN_FILES``.

    Returns the limit that now applies.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
