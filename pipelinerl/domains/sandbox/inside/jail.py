"""The jail: a warm interpreter inside the namespaces that forks a supervisor for every run. Standard library only.

`python -E -S -B jail.py MODE UID WORKSPACE READABLE…`, with a socket as standard input. It receives descriptors, each
one end of a connection over which `supervisor.py` receives a program and reports its run. The jail ends when the socket
closes. It never holds a program or an input, so no run finds another's in its memory.

WORKSPACE is null, or the JSON of `{"disk_mb": int, "port": int}` for the jail of one workspace. Its runs share a folder
in memory, and a network that holds loopback and, if the port is not 0, a socket that listens there. The jail sends that
socket away: only the process that receives it can answer.

A run costs three forks, each of which copies every page that it writes to. So the jail holds little, and prepares once
what each fork would prepare: the standard streams, the functions of libc, `LD_BIND_NOW`. `random` and `threading` have
callbacks for forks, so only programs import them.
"""

import bisect  # noqa: F401  programs import these, and every input would load them again
import collections  # noqa: F401
import contextlib
import copy  # noqa: F401
import datetime  # noqa: F401
import decimal  # noqa: F401
import fcntl
import fractions  # noqa: F401
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import operator  # noqa: F401
import os
import re  # noqa: F401
import select
import site
import socket
import string  # noqa: F401
import struct
import sys
import typing  # noqa: F401

import program
import supervisor
from kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_SET_DUMPABLE,
    bind_read_only,
    map_own_user,
    mount,
    pivot_root,
    prctl,
    unshare,
)
from memory_group import GroupFolder, open_folder, write_setting
from syscalls import CallFilter

ROOT = "/sys"
"""Mount point of the new root in the jail's mount namespace: a folder that exists, and that no program needs."""
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
DEFAULT_SOCKET_BYTES = 320_000
"""Where /proc does not show it: Linux's default of 212,992 bytes, times 1.5."""
NAMESPACES = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def main() -> None:
    mode, uid, workspace, *readable = sys.argv[1:]
    control = socket.socket(fileno=0)
    os.umask(0o022)
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    pid, becomes_another = os.getpid(), mode == "user" and os.geteuid() == 0
    groups = None if becomes_another else open_folder()
    try:
        serve_jailed(control, processes, groups, mode, int(uid), json.loads(workspace), readable)
    finally:
        if groups is not None and os.getpid() == pid:
            groups.close()


def serve_jailed(
    control: socket.socket,
    processes: int,
    groups: GroupFolder | None,
    mode: str,
    uid: int,
    workspace: dict[str, int] | None,
    readable: list[str],
) -> None:
    """Enters the jail and forks a supervisor for every connection, until the socket closes."""
    listening = None
    try:
        isolate(mode, uid, readable, processes)
        if workspace:
            owner = uid if mode == "root" else os.geteuid()
            supervisor.mount_memory(supervisor.WORK, workspace["disk_mb"], f"mode=755,uid={owner},gid={owner}")
            listening = open_network(processes, workspace["port"])
    except OSError as failure:
        control.sendall(f"{failure}\n".encode())
        return
    jail = supervisor.JailSettings(
        processes=processes,
        calls=CallFilter(sockets=workspace is not None),
        own_users=mode == "root",
        socket_bytes=socket_bytes(processes),
        groups=groups,
    )
    if not namespaces_work(control, jail):
        return
    sys.path = [path for path in sys.path if not path.startswith(os.path.dirname(__file__))]
    sys.path += site.getsitepackages() + [path for path in readable if path.endswith("-packages")]
    site.setquit()
    site.setcopyright()
    site.sethelper()
    os.environ.pop("LD_BIND_NOW", None)
    program.open_standard_streams()
    gc.collect()
    gc.freeze()
    gc.disable()
    socket.send_fds(control, [b"ready\n"], [listening.fileno()] if listening else [])
    if listening:
        listening.close()
    serve(control, jail)


def open_network(processes: int, port: int) -> socket.socket | None:
    """Brings loopback up, and returns a socket that listens there on ``port``, if it is not 0."""
    for name in ("tcp_rmem", "tcp_wmem"):  # no limit would count megabytes in a connection
        with contextlib.suppress(OSError):
            write_setting(processes, f"sys/net/ipv4/{name}", f"4096 131072 {DEFAULT_SOCKET_BYTES}")
    listening = socket.socket()
    fcntl.ioctl(listening, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    if not port:
        listening.close()
        return None
    listening.bind(("127.0.0.1", port))
    listening.listen()
    return listening


def socket_bytes(processes: int) -> int:
    """Returns the bytes that a socket's buffer may hold: the kernel takes a message while the buffer is not full."""
    try:
        return int(supervisor.read_text(processes, "sys/net/core/wmem_default")) * 3 // 2
    except (OSError, ValueError):
        return DEFAULT_SOCKET_BYTES


def namespaces_work(control: socket.socket, jail: supervisor.JailSettings) -> bool:
    """Whether a program's namespaces can be entered. Sends the reason if not."""
    pid = os.fork()
    if pid == 0:
        try:
            supervisor.enter_namespaces({"code": "", "limits": {"disk_mb": 1}}, jail)
        except OSError as failure:
            control.sendall(f"a program's namespaces: {failure}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def serve(control: socket.socket, jail: supervisor.JailSettings) -> None:
    """Forks a supervisor for every connection that arrives, until the socket closes.

    It waits for supervisors that have ended, so that their CPU time counts as the jail's.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    running: dict[int, int] = {}
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                os.waitpid(running.pop(ready), 0)
                poll.unregister(ready)
                os.close(ready)
                continue
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                return
            pid = os.fork()
            if pid == 0:
                control.close()
                supervisor.supervise_program(socket.socket(fileno=descriptors[0]), jail)
                os._exit(0)
            os.close(descriptors[0])
            exited = os.pidfd_open(pid)
            running[exited] = pid
            poll.register(exited, select.POLLIN)


def isolate(mode: str, uid: int, readable: list[str], processes: int) -> None:
    """Enters the namespaces and the root. A caller that is root builds the root before it becomes another user."""
    # pivot_root and not chroot: after chroot a process may not make user namespaces.
    if mode == "root":
        unshare(NAMESPACES)
        build_root(readable)
        pivot_root(ROOT)
    elif os.geteuid() == 0:
        unshare(CLONE_NEWNS)
        build_root(readable)
        pivot_root(ROOT)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        prctl(PR_SET_DUMPABLE, 1)
        enter_user_namespace(processes)
    else:
        enter_user_namespace(processes)
        build_root(readable)
        pivot_root(ROOT)
    if not os.access(os.__file__, os.R_OK):
        raise OSError(f"user {os.geteuid()} cannot read the interpreter's {os.path.dirname(os.__file__)}")


def enter_user_namespace(processes: int) -> None:
    """Enters new namespaces with all capabilities inside them, as a user that has none outside."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | NAMESPACES)
    map_own_user(processes, uid, gid)


def build_root(readable: list[str]) -> None:
    """Builds a separate root: system and interpreter read-only, and two empty folders in which a program may write."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in supervisor.WRITABLE:
        os.makedirs(ROOT + path)
    for path in (*SYSTEM_PATHS, *SYSTEM_FILES, *DEVICES, *readable):
        mount_in_root(path)
    mount(None, ROOT, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def mount_in_root(path: str) -> None:
    """Mounts ``path`` read-only at the same place inside the root."""
    target = ROOT + path
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        open(target, "w", encoding="utf-8").close()
    bind_read_only(path, target)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
