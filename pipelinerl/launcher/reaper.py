"""Ends a run whose launcher was killed. A separate process that uses only the standard library and sleeps until then.

Consumes lines on stdin: the run's mark, then `done` if the launcher ended everything itself. When the pipe closes
without `done`, every process whose environment carries the mark gets SIGTERM, and SIGKILL after the grace period. In
both cases the reaper removes the run's temporary folder. It inherits the lock of the run folder, so that the next
launcher waits until all processes have ended.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

SHARED_MEMORY = "/dev/shm/"
KILL_TIMEOUT_S = 5.0
"""A process that SIGKILL does not end in this time waits in the kernel, and is left. Keepers wait as long."""
KEEPER = b"/world/keeper.py"


def marked_processes(mark: str) -> list[int]:
    """Return the pids of all live processes of this user whose environment contains `mark` (NAME=value)."""
    wanted = mark.encode()
    found = []
    for pid in all_processes():
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as stream:
                if wanted in stream.read().split(b"\0"):
                    found.append(pid)
    return found


def all_processes() -> list[int]:
    """Return the pids of all processes but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def shared_memory_of(pids: list[int]) -> set[str]:
    """Return the paths of shared-memory segments and semaphores that these processes have mapped."""
    # Not by name: a semaphore's creator has it mapped under its first, temporary one.
    mapped: set[tuple[int, int]] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as stream:
                mapped.update(_device_and_inode(line) for line in stream if SHARED_MEMORY in line)
    with contextlib.suppress(OSError):
        with os.scandir(SHARED_MEMORY) as entries:
            found = [(entry.path, entry.stat(follow_symlinks=False)) for entry in entries]
            return {path for path, status in found if (status.st_dev, status.st_ino) in mapped}
    return set()


def _device_and_inode(line: str) -> tuple[int, int]:
    """Read device and inode from a line of /proc/PID/maps: `ADDRESSES MODE OFFSET MAJOR:MINOR INODE PATH`."""
    _, _, _, device, inode, _ = line.split(maxsplit=5)
    major, minor = (int(part, 16) for part in device.split(":"))
    return os.makedev(major, minor), int(inode)


def keepers_of(pids: list[int]) -> list[int]:
    """Return the keepers among the processes (`world/keeper.py`)."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline", "rb") as stream:
                if any(argument.endswith(KEEPER) for argument in stream.read().split(b"\0")[:4]):
                    found.append(pid)
    return found


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def sweep(mark: str, grace_s: float, segments: Iterable[str] = ()) -> int:
    """End every process that carries the mark, unlink their shared memory, and return how many there were at first.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL. 0: only SIGKILL.
        segments: further paths of shared memory to unlink, except those that another process has mapped.
    """
    pids = marked_processes(mark)
    count = len(pids)
    segments = shared_memory_of(pids) | set(segments)
    if grace_s > 0:
        signal_all(pids, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while pids and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = marked_processes(mark)
        segments |= shared_memory_of(pids)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (pids := marked_processes(mark)) and time.monotonic() < deadline:
        segments |= shared_memory_of(pids)
        keepers = keepers_of(pids)  # they end by themselves: only they find processes with another environment
        signal_all(keepers, signal.SIGCONT)
        signal_all([pid for pid in pids if pid not in keepers], signal.SIGKILL)
        time.sleep(0.02)
    signal_all(pids, signal.SIGKILL)
    for path in segments - shared_memory_of(all_processes()) if segments else ():
        with contextlib.suppress(OSError):
            os.unlink(path)
    return count


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark = sys.stdin.readline().strip()
    if mark and sys.stdin.readline().strip() != "done":
        sweep(mark, grace_s=float(sys.argv[1]))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.closerange(3, 1024)  # the lock, one of a launcher's first files: the next launcher need not wait for the rest
    os.execvp("rm", ["rm", "-rf", "--", sys.argv[2]])  # rm handles folders of any depth, as sandboxed programs make


if __name__ == "__main__":
    main()
