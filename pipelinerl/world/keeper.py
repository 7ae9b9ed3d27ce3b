"""Runs a command and ends all that it started. A process of its own that uses only the standard library.

    python -I -S keeper.py PATIENCE_S PARENT COMMAND…

All processes that the command starts stay below this one (`PR_SET_CHILD_SUBREAPER`), in every session and with every
environment. They end when the command has ended, and when PARENT, the process that started this one, has ended.
SIGTERM, SIGINT and SIGHUP are passed on to the command, and all that is left is killed `PATIENCE_S` later. The exit
status is the command's. If this process is killed, so is the command.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ORPHANED_S = 5.0
"""Longest patience when PARENT has ended. The launcher's reaper waits as long (`REAPER_GRACE_S`)."""
LEFTOVER_S = 1.0
"""Longest patience when the command has ended: Python's resource tracker removes shared memory in this time."""
KILL_S = 5.0
"""A process that SIGKILL does not end in this time waits in the kernel for ever, or belongs to another user."""
POLL_S = 0.02
"""Between two searches for processes that are left."""
LONGEST_WAIT_S = 3600.0
"""Longest wait of one call, which takes no infinity. The loop then waits again."""
NOT_STARTED = 127
"""As shells say it."""


class Keeper:
    """Waits for the command and all processes that it started, and ends them."""

    def __init__(self, command: int, parent: int, patience_s: float):
        self._command, self._parent, self._patience_s = command, parent, patience_s
        self.status: int | None = None
        """The command's status from `os.waitpid`."""

    def await_command(self) -> None:
        """Return when the command has ended, or its patience after a signal is over."""
        end_at = math.inf
        while self._reap() and self.status is None and (left_s := end_at - time.monotonic()) > 0:
            received = signal.sigtimedwait((*PASSED_ON, signal.SIGCHLD), min(left_s, LONGEST_WAIT_S))
            if received is not None and received.si_signo != signal.SIGCHLD:
                os.kill(self._command, received.si_signo)
                limit_s = self._patience_s if os.getppid() == self._parent else min(self._patience_s, ORPHANED_S)
                end_at = min(end_at, time.monotonic() + limit_s)

    def end_all(self) -> None:
        """End all that is left: with SIGTERM before SIGKILL if the command ended in time."""
        kill_at = time.monotonic()
        if self._reap() and self.status is not None and self._patience_s:
            kill_at += min(self._patience_s, LEFTOVER_S)
            signal_descendants(signal.SIGTERM)
        while self._reap() and time.monotonic() < kill_at + KILL_S:
            if time.monotonic() >= kill_at:
                signal_descendants(signal.SIGKILL)
            signal.sigtimedwait((signal.SIGCHLD,), POLL_S)

    def _reap(self) -> bool:
        """Take the status of children that have ended. Returns whether there are others."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                if ended[0] == 0:
                    return True
                if ended[0] == self._command:
                    self.status = ended[1]
        return False


def signal_descendants(number: int) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants(ancestor: int) -> list[int]:
    """Return the pids of all processes below one, parents first."""
    children: dict[int, list[int]] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as stream:
                parent = int(stream.read().rpartition(b")")[2].split()[1])  # a name may hold blanks and brackets
            children.setdefault(parent, []).append(pid)
    found = [ancestor]
    for pid in found:
        found += children.get(pid, ())
    return found[1:]


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def start(command: list[str], keeper: int, mask: set[int | signal.Signals]) -> None:
    """Become the command, in a process that the keeper has forked."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.setpgid(0, 0)
        if os.getppid() == keeper:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(NOT_STARTED)


def leave(status: int) -> None:
    """End as the command did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    patience_s, parent, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    keeper = os.getpid()
    if os.getppid() != parent:
        os._exit(NOT_STARTED)
    child = os.fork()
    if child == 0:
        start(command, keeper, mask)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # so that the other end sees it when the command closes its pipes
        os.dup2(nothing, descriptor)
    kept = Keeper(child, parent, patience_s)
    kept.await_command()
    kept.end_all()
    leave(signal.SIGKILL if kept.status is None else kept.status)


if __name__ == "__main__":
    main()
