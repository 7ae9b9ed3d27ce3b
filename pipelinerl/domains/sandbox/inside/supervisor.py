"""Supervises one run of a program on one input: its namespaces, its limits, its end.

There are three processes. The supervisor stays outside the program's PID namespace, so the program cannot address it.
*Init* is process 1 in the namespace: when it ends, the kernel kills everything that the program started. The *program*
is a fork of the jail with namespaces for mounts, processes and network. When the supervisor ends, its files are gone.

The connection brings the program, one input and the limits. Back go a JSON line when the program starts, and one with
its outcome. The supervisor ends then, or when the other side closes the connection.

In a workspace, the program is a command. It runs in the jail's folder and network, which the workspace's runs share.
"""

import base64
import contextlib
import fcntl
import json
import marshal
import math
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import program
from kernel import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MS_NODEV,
    MS_NOSUID,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    drop_capabilities,
    ignore,
    map_own_user,
    mount,
    prctl,
    unshare,
)
from memory_group import GroupFolder
from syscalls import CallFilter

WORK = "/sandbox"
WRITABLE = ("/tmp", WORK)
MAX_STDERR = 8_192
"""Bytes kept of the error output, its end: a traceback fits."""
MAX_FILES = 16_384
"""Files in each writable folder. Empty ones cost no disk, but about 1 kB of kernel memory each: 16 MB."""
STARTED = b'{"started": true}\n'
WATCH_S = 0.05
"""Interval of counting memory and threads: for this long, a program may exceed its memory."""
F_ADD_SEALS, SEALS = 1033, 0x2 | 0x4 | 0x8
"""Seals that forbid to shrink, to grow, and to write a file."""
PIPE_BYTES = 1 << 16
"""Capacity of a pipe. The filter of system calls keeps the program from enlarging it."""


class JailSettings(NamedTuple):
    """Settings that a jail passes to its supervisors."""

    processes: int
    """Descriptor of a /proc that shows the supervisor's PID namespace."""
    calls: CallFilter
    """The filter that programs get."""
    own_users: bool
    """Whether each program runs as the user in its specification. False: it gets a user namespace."""
    socket_bytes: int
    """Maximum size of a socket's buffer."""
    groups: GroupFolder | None
    """The folder for groups in which the kernel counts a run's memory. None: the supervisor counts it."""


class Closed(Exception):
    """The other side closed the connection."""


def supervise_program(connection: socket.socket, jail: JailSettings) -> None:
    """Makes the one run of a connection."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        specification = receive(connection)
        enter_namespaces(specification, jail)
        init = start_init()
        run = Run(connection, specification, jail, init)
        try:
            connection.sendall(STARTED)
            outcome = run.run()
        finally:
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)
            run.close()
        send(connection, outcome)
    except (Closed, OSError):
        return


def receive(connection: socket.socket) -> dict:
    """Reads program, input and limits: eight bytes of length, then data of `marshal`."""
    (length,) = struct.unpack("<Q", receive_bytes(connection, 8))
    return marshal.loads(receive_bytes(connection, length))


def receive_bytes(connection: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        chunk = connection.recv(min(count - len(content), 1 << 20))
        if not chunk:
            raise Closed
        content += chunk
    return bytes(content)


def send(connection: socket.socket, message: dict) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def enter_namespaces(specification: dict, jail: JailSettings) -> None:
    """Gives the program fresh folders in memory, a network without devices, and a PID namespace.

    Without a user of its own, it also gets a user namespace, in which the kernel counts only its processes. A command
    gets a fresh /tmp only.
    """
    is_command = "command" in specification
    namespaces = CLONE_NEWNS | CLONE_NEWPID | (0 if is_command else CLONE_NEWNET)
    if jail.own_users:
        unshare(namespaces)
    else:
        uid, gid = os.geteuid(), os.getegid()
        unshare(namespaces | CLONE_NEWUSER)
        map_own_user(jail.processes, uid, gid)
    for folder in WRITABLE[:1] if is_command else WRITABLE:
        mount_memory(folder, specification["limits"]["disk_mb"], "mode=1777")
    if is_command:
        return
    file = os.open(f"{WORK}/{program.FILE}", os.O_WRONLY | os.O_CREAT, 0o644)
    write(file, specification["code"].encode("utf-8", "surrogatepass"))
    os.close(file)


def mount_memory(folder: str, size_mb: int, options: str) -> None:
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_mb}m,nr_inodes={MAX_FILES},{options}")


def write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def start_init() -> int:
    """Starts process 1 of the program's PID namespace, which waits until it is killed. Returns its id."""
    pid = os.fork()
    if pid == 0:
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        drop_capabilities()
        ignore(signal.SIGINT)
        ignore(signal.SIGCHLD)
        while True:
            signal.pause()
    return pid


class Run:
    """One run: forks the program, collects its output, and kills it when it passes a limit."""

    def __init__(self, connection: socket.socket, specification: dict, jail: JailSettings, init: int):
        self._connection, self._specification, self._jail, self._init = connection, specification, jail, init
        self._limits = specification["limits"]
        self._output, self._errors = bytearray(), bytearray()
        self._next_look = time.monotonic() + WATCH_S
        self._parent = os.getppid()
        self._group = None
        if jail.groups is not None:
            # A group also counts the two folders in memory, which have a limit of their own.
            memory_mb = self._limits["memory_mb"] + len(WRITABLE) * self._limits["disk_mb"]
            self._group = jail.groups.group(memory_bytes=memory_mb << 20, processes=self._limits["processes"])

    def run(self) -> dict:
        """``ended``: exited, signal, time, memory or output."""
        started = time.monotonic()
        inbox = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        write(inbox, self._specification["stdin"])
        os.lseek(inbox, 0, os.SEEK_SET)
        fcntl.fcntl(inbox, F_ADD_SEALS, SEALS)  # no limit would count what the program writes into it
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_program((inbox, their_out, their_err))
            except Exception as failure:  # noqa: BLE001 — whatever it is, the program did not run
                os.write(2, f"the sandbox: {failure!r}\n".encode(errors="replace"))
            finally:  # it did not: it has no exit code, and ends like a program on a machine that lacks memory
                os.kill(os.getpid(), signal.SIGKILL)
        for descriptor in (inbox, their_out, their_err):
            os.close(descriptor)
        ended, code = self._watch(pid, out, err, started + self._limits["wall_s"])
        if self._group is not None and self._group.was_full():
            ended = "memory"
        return {
            "ended": ended or ("exited" if code >= 0 else "time" if code == -signal.SIGXCPU else "signal"),
            "exit_code": code,
            "seconds": time.monotonic() - started,
            "stdout": base64.b64encode(self._output).decode(),
            "stderr": base64.b64encode(self._errors).decode(),
        }

    def _become_program(self, standard: Sequence[int]) -> None:
        if self._group is not None:
            self._group.enter()
        uid = self._specification["uid"] if self._jail.own_users else None
        program.become(standard, self._limits, uid, WORK, self._jail.calls)
        if "command" in self._specification:
            program.execute_command(self._specification["command"], self._specification["environment"])
        program.execute(self._specification["code"])

    def close(self) -> None:
        """Removes the group. Call it when all processes of the run have ended."""
        if self._group is not None:
            self._group.remove()

    def _watch(self, pid: int, out: int, err: int, deadline: float) -> tuple[str, int]:
        """Waits until the program has ended. Returns the limit that it passed ('' = none) and its exit code."""
        exited = os.pidfd_open(pid)
        poll = select.poll()
        for descriptor in (exited, out, err):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._connection, select.POLLRDHUP)
        ended, passed = False, ""
        try:
            while not ended and not passed:
                events = dict(poll.poll(1e3 * WATCH_S))
                if self._connection.fileno() in events:
                    raise Closed
                for descriptor in (out, err):
                    if descriptor in events and not self._read(descriptor, self._buffer(descriptor, out)):
                        poll.unregister(descriptor)
                ended = exited in events and not {out, err} & events.keys()
                passed = self._passed_limit(pid, deadline)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        return passed, os.waitstatus_to_exitcode(status)

    def _buffer(self, descriptor: int, out: int) -> bytearray:
        return self._output if descriptor == out else self._errors

    def _read(self, descriptor: int, buffer: bytearray) -> bool:
        """Reads one chunk. Returns whether there may be more."""
        chunk = os.read(descriptor, 1 << 16)
        buffer += chunk
        del self._errors[:-MAX_STDERR]
        return bool(chunk)

    def _passed_limit(self, pid: int, deadline: float) -> str:
        now = time.monotonic()
        allowed = self._limits["output_kb"] * 1024
        if len(self._output) > allowed:
            del self._output[allowed:]
            return "output"
        if now > deadline:
            return "time"
        if now < self._next_look:
            return ""
        if self._group is not None:
            pids, used = self._group.processes(), 0
        else:
            pids = descendants(self._jail.processes, pid, self._init)
            used = held_bytes(self._jail, pids, self._init)
        self._share_cores(pids)
        self._next_look = time.monotonic() + WATCH_S
        return "memory" if used > self._limits["memory_mb"] << 20 else ""

    def _share_cores(self, pids: list[int]) -> None:
        """Gives all threads of the run together the same share of the cores as one thread of another run.

        Otherwise thirty processes leave another run a thirtieth of a core, so that it passes its wall time.
        """
        tasks = tasks_of(self._jail.processes, pids)
        num_running = sum(state == "R" for _, state, _ in tasks)
        # A step of niceness takes a fifth of a thread's weight: after these steps all of them weigh as much as one.
        steps = math.ceil(math.log(max(num_running, 1), 1.25))
        nice = min(19, os.nice(0) + steps)
        lower = [task for task, _, has in tasks if has < nice and task != self._init]
        if not lower:
            return
        if not self._jail.own_users:
            lower_priority(lower, nice)
            return
        own = os.geteuid()
        os.seteuid(self._specification["uid"])  # its user may, but root only with CAP_SYS_NICE
        lower_priority(lower, nice)
        os.seteuid(own)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel resets it when a process changes its user
        if os.getppid() != self._parent:
            raise Closed


def descendants(processes: int, *roots: int) -> list[int]:
    """Returns these processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir(processes):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int(read_text(processes, f"{name}/stat").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, queue = list(roots), list(roots)
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def tasks_of(processes: int, pids: list[int]) -> list[tuple[int, str, int]]:
    """Returns (id, state, niceness) of each thread of these processes."""
    tasks = []
    for pid in pids:
        with contextlib.suppress(OSError):
            folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=processes)
            try:
                for name in os.listdir(folder):
                    with contextlib.suppress(OSError, IndexError, ValueError):
                        fields = read_text(folder, f"{name}/stat").rpartition(")")[2].split()
                        tasks.append((int(name), fields[0], int(fields[16])))
            finally:
                os.close(folder)
    return tasks


def lower_priority(tasks: list[int], nice: int) -> None:
    for task in tasks:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, task, nice)


def held_bytes(jail: JailSettings, pids: list[int], init: int) -> int:
    """Returns the memory of these processes: resident pages, page tables, and the capacity of sockets and pipes.

    If a process hides its descriptors, all count as sockets. ``init`` has none.
    """
    sizes = {"socket": jail.socket_bytes, "pipe": PIPE_BYTES}
    buffers: set[str] = set()
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in read_text(jail.processes, f"{pid}/status").splitlines():
                if line.startswith(("VmRSS:", "VmPTE:", "VmSwap:")):
                    total += int(line.split()[1]) << 10
        if pid == init:
            continue
        try:
            folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=jail.processes)
            try:
                for name in os.listdir(folder):
                    with contextlib.suppress(OSError):
                        buffers.add(os.readlink(name, dir_fd=folder))
            finally:
                os.close(folder)
        except PermissionError:
            total += program.MAX_DESCRIPTORS * jail.socket_bytes
        except OSError:
            pass  # it has ended
    return total + sum(sizes.get(buffer.partition(":")[0], 0) for buffer in buffers)


def read_text(folder: int, path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)
