"""Supervises one program: its namespaces, one run per input, its limits, its end.

There are three processes. The supervisor stays outside the program's PID namespace, so the program cannot address it.
*Init* is process 1 inside the namespace and ends everything there on request. The program is forked once per input,
as a separate user if the jail is root. When init ends, the kernel ends everything that the program started.

Consumes a program as JSON on the connection. Emits one JSON line when a run starts and one with its outcome. Ends after
the last run, after a run that did not end by itself, or when the other side closes the connection.
"""

import base64
import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time

import program
from kernel import (
    CAP_KILL,
    CLONE_NEWNS,
    CLONE_NEWPID,
    MS_NODEV,
    MS_NOSUID,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    keep_capabilities,
    mount,
    prctl,
    unshare,
)
from syscalls import CallFilter

WORK = "/sandbox"
WRITABLE = ("/tmp", WORK)
MAX_STDERR = 8_192
MAX_FILES = 16_384
WATCH_S = 0.05
REAP_S = 5.0


class Closed(Exception):
    """The other side closed the connection."""


def supervise_program(connection: socket.socket, processes: int, calls: CallFilter, *, own_users: bool) -> None:
    """Runs the program of one connection.

    Args:
        connection: a stream socket.
        processes: descriptor of the /proc in which the supervisor's PID namespace is seen.
        calls: the filter that the program gets.
        own_users: run the program as the user that the specification names.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(Closed, OSError):
        specification = receive(connection)
        enter_namespaces(specification)
        init = Init()
        try:
            uid = specification["uid"] if own_users else None
            for stdin in specification["stdins"]:
                send(connection, {"started": True})
                outcome = Run(connection, processes, specification, init.pid).run(stdin, uid, calls)
                init.clear()
                send(connection, outcome)
                if outcome["ended"] != "exited" or (outcome["exit_code"] and specification["stop_on_failure"]):
                    break
        finally:
            init.end()


def receive(connection: socket.socket) -> dict:
    """The program and its limits: eight bytes of length, then JSON."""
    (length,) = struct.unpack("<Q", receive_bytes(connection, 8))
    return json.loads(receive_bytes(connection, length).decode("utf-8", "surrogatepass"))


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


def enter_namespaces(specification: dict) -> None:
    """Gives the program fresh folders in memory, and its processes a PID namespace of their own."""
    unshare(CLONE_NEWNS | CLONE_NEWPID)
    options = f"size={specification['limits']['disk_mb']}m,nr_inodes={MAX_FILES},mode=1777"
    for folder in WRITABLE:
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)
    with open(f"{WORK}/{program.FILE}", "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(specification["code"])


class Init:
    """Process 1 of the program's PID namespace. It obeys one pipe and answers on another."""

    def __init__(self) -> None:
        theirs, self._orders = os.pipe()
        self._answers, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(theirs, 0)
            os.dup2(answer, 1)
            os.closerange(2, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            end_all_on_request()
            os._exit(0)
        os.close(theirs)
        os.close(answer)

    def clear(self) -> None:
        """Ends all that a run left behind."""
        os.write(self._orders, b"c")
        if not os.read(self._answers, 1):
            raise Closed

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def end_all_on_request() -> None:
    """The loop of process 1: a byte on descriptor 0 asks it to end all others, one on 1 says that they are gone."""
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    keep_capabilities(CAP_KILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.read(0, 1):
        deadline = time.monotonic() + REAP_S
        while time.monotonic() < deadline:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                break
            time.sleep(0.0005)
        else:
            return
        os.write(1, b"c")


class Run:
    """One run of the program: forks it, collects its output, ends it when it passes a limit."""

    def __init__(self, connection: socket.socket, processes: int, specification: dict, init: int):
        self._connection, self._processes, self._init = connection, processes, init
        self._specification, self._limits = specification, specification["limits"]
        self._output, self._errors = bytearray(), bytearray()
        self._next_look = time.monotonic() + WATCH_S

    def run(self, stdin: str, uid: int | None, calls: CallFilter) -> dict:
        """``ended``: exited, signal, time, memory or output."""
        started = time.monotonic()
        inbox = os.memfd_create("stdin")
        with open(inbox, "wb", closefd=False) as file:
            file.write(stdin.encode("utf-8", "surrogatepass"))
        os.lseek(inbox, 0, os.SEEK_SET)
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            program.become((inbox, their_out, their_err), self._limits, uid, WORK, calls)
            program.execute(self._specification["code"])
        for descriptor in (inbox, their_out, their_err):
            os.close(descriptor)
        try:
            ended, code = self._watch(pid, out, err, started + self._limits["wall_s"])
        finally:
            os.close(out)
            os.close(err)
        return {
            "ended": ended or ("exited" if code >= 0 else "time" if code == -signal.SIGXCPU else "signal"),
            "exit_code": code,
            "seconds": time.monotonic() - started,
            "stdout": base64.b64encode(self._output).decode(),
            "stderr": base64.b64encode(self._errors).decode(),
        }

    def _watch(self, pid: int, out: int, err: int, deadline: float) -> tuple[str, int]:
        """Until the program has ended: the limit that it passed ('' = none) and its exit code."""
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
            os.close(exited)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        return passed, os.waitstatus_to_exitcode(status)

    def _buffer(self, descriptor: int, out: int) -> bytearray:
        return self._output if descriptor == out else self._errors

    def _read(self, descriptor: int, buffer: bytearray) -> bool:
        """Whether there may be more."""
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
        self._next_look = now + WATCH_S
        resident = sum(resident_bytes(self._processes, each) for each in descendants(self._processes, pid, self._init))
        return "memory" if resident > self._limits["memory_mb"] << 20 else ""


def descendants(processes: int, *roots: int) -> list[int]:
    """These processes and all below them."""
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


def resident_bytes(processes: int, pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(read_text(processes, f"{pid}/statm").split()[1]) * resource.getpagesize()
    return 0


def read_text(folder: int, path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)
