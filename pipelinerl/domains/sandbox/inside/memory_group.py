"""A cgroup (version 2) for every run, where one can be made: the kernel limits the run's memory and processes.

Without it, the supervisor counts every ``WATCH_S``. A folder for groups can be made as root on a machine with systemd,
or in a part of the tree that is delegated to the user (`Delegate=yes`). Standard library only.
"""

import contextlib
import os
import time

REMOVE_S = 2.0
"""The kernel needs milliseconds. A group that stays costs the machine a folder, so the run goes on."""
PREFIX = "pipelinerl-sandbox-"


def parents(cgroup: str, mountinfo: str) -> list[str]:
    """Returns the folders in which groups may be made: the process's own group, and the one above it.

    Args:
        cgroup: content of /proc/self/cgroup.
        mountinfo: content of /proc/self/mountinfo.
    """
    own = next((line[3:] for line in cgroup.splitlines() if line.startswith("0::/")), None)
    if own is None:
        return []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        if right.split()[:1] != ["cgroup2"] or not f"{own}/".startswith(root.rstrip("/") + "/"):
            continue
        folder = os.path.normpath(point + "/" + own[len(root.rstrip("/")) :])
        return [folder] if folder == os.path.normpath(point) else [folder, os.path.dirname(folder)]
    return []


class GroupFolder:
    """The folder of a jail's groups. ``close`` removes it.

    Raises:
        OSError: the kernel counts no memory there, or this user may not make groups there.
    """

    def __init__(self, path: str):
        self._path = path
        os.mkdir(path)
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            write_setting(self._folder, "cgroup.subtree_control", "+memory +pids")
            self._try_out()
        except OSError:
            os.rmdir(path)
            raise

    def _try_out(self) -> None:
        """Lets a process enter a group and end. Raises ``OSError`` if it may not."""
        group = MemoryGroup(self._folder, "trial", memory_bytes=1 << 28, processes=8)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                group.enter()
                os._exit(0)
            os._exit(1)
        failed = os.waitpid(pid, 0)[1]
        group.remove()
        if failed:
            raise PermissionError(f"a process may not enter groups in {self._path}")

    def group(self, *, memory_bytes: int, processes: int) -> "MemoryGroup":
        """Makes the group of the run that this process supervises."""
        return MemoryGroup(self._folder, f"run-{os.getpid()}", memory_bytes=memory_bytes, processes=processes)

    def close(self) -> None:
        """Kills all processes in the groups and removes the groups. By now, their path may lie outside the root."""
        with contextlib.suppress(OSError):
            write_setting(self._folder, "cgroup.kill", "1")
        for name in os.listdir(self._folder):
            if name.startswith("run-"):
                remove(self._folder, name)
        remove(self._parent, os.path.basename(self._path))


class MemoryGroup:
    """The group of one run."""

    def __init__(self, parent: int, name: str, *, memory_bytes: int, processes: int):
        self._parent, self._name = parent, name
        os.mkdir(name, dir_fd=parent)
        try:
            for file, value in (
                ("memory.max", memory_bytes),
                ("memory.oom.group", 1),
                ("pids.max", processes),
            ):
                write_setting(parent, f"{name}/{file}", str(value))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                write_setting(parent, f"{name}/memory.swap.max", "0")
        except OSError:
            os.rmdir(name, dir_fd=parent)
            raise

    def enter(self) -> None:
        """Moves the calling process into the group."""
        write_setting(self._parent, f"{self._name}/cgroup.procs", "0")

    def processes(self) -> list[int]:
        """The processes in the group."""
        descriptor = os.open(f"{self._name}/cgroup.procs", os.O_RDONLY, dir_fd=self._parent)
        try:
            return [int(pid) for pid in os.read(descriptor, 1 << 16).split()]
        finally:
            os.close(descriptor)

    def was_full(self) -> bool:
        """Whether the kernel killed the run's processes because they exceeded the memory."""
        descriptor = os.open(f"{self._name}/memory.events", os.O_RDONLY, dir_fd=self._parent)
        try:
            events = dict(line.split() for line in os.read(descriptor, 4096).decode().splitlines())
        finally:
            os.close(descriptor)
        return int(events.get("oom_kill", 0)) > 0

    def remove(self) -> None:
        remove(self._parent, self._name)


def remove(parent: int, name: str) -> None:
    """Removes an empty group. The kernel refuses for a moment after its last process has ended."""
    deadline = time.monotonic() + REMOVE_S
    while time.monotonic() < deadline:
        try:
            os.rmdir(name, dir_fd=parent)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.001)


def write_setting(folder: int, file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY, dir_fd=folder)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def open_folder() -> GroupFolder | None:
    """Makes the folder of groups of this jail. None: the machine allows none."""
    try:
        with (
            open("/proc/self/cgroup", encoding="utf-8", errors="replace") as own,
            open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts,
        ):
            candidates = parents(own.read(), mounts.read())
    except OSError:
        return None
    for parent in candidates:
        with contextlib.suppress(OSError), open(f"{parent}/cgroup.subtree_control", encoding="utf-8") as file:
            if "memory" in file.read().split():
                return GroupFolder(f"{parent}/{PREFIX}{os.getpid()}")
    return None
