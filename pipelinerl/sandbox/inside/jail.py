"""The jail: a warm interpreter inside the namespaces that forks a supervisor per program. Standard library only.

`python -E -s -B jail.py MODE UID DISK_MB READABLE…`, with a socket as standard input. Consumes descriptors. Each is one
end of a connection, over which `supervisor.py` receives a program and reports its runs. The jail ends when the socket
closes. It never runs a program's code itself.
"""

import bisect  # noqa: F401  programs import these, and every input would load them again
import collections  # noqa: F401
import contextlib
import copy  # noqa: F401
import datetime  # noqa: F401
import decimal  # noqa: F401
import fractions  # noqa: F401
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import json  # noqa: F401
import math  # noqa: F401
import operator  # noqa: F401
import os
import random  # noqa: F401
import re  # noqa: F401
import signal
import socket
import string  # noqa: F401
import sys
import typing  # noqa: F401

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
    mount,
    prctl,
    unshare,
)
from syscalls import CallFilter

ROOT = "/sys"
"""Where the new root is mounted in the jail's mount namespace: a folder that exists and that no program needs."""
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
NAMESPACES = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS


def main() -> None:
    mode, uid, *readable = sys.argv[1:]
    control = socket.socket(fileno=0)
    os.umask(0o022)
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        isolate(mode, int(uid), readable)
    except OSError as failure:
        control.sendall(f"{failure}\n".encode())
        return
    sys.path = [path for path in sys.path if not path.startswith(os.path.dirname(__file__))]
    sys.path += [path for path in readable if path.endswith("-packages")]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    calls = CallFilter()
    gc.collect()
    gc.freeze()
    control.sendall(b"ready\n")
    serve(control, processes, calls, own_users=mode == "root")


def serve(control: socket.socket, processes: int, calls: CallFilter, *, own_users: bool) -> None:
    """Forks a supervisor for every connection that arrives, until the socket closes."""
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            control.close()
            supervisor.supervise_program(socket.socket(fileno=descriptors[0]), processes, calls, own_users=own_users)
            os._exit(0)
        os.close(descriptors[0])


def isolate(mode: str, uid: int, readable: list[str]) -> None:
    """Enters the namespaces and the root. A caller that is root builds the root before it becomes another user."""
    if mode == "root":
        unshare(NAMESPACES)
        build_root(readable)
    elif os.geteuid() == 0:
        unshare(CLONE_NEWNS)
        build_root(readable)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        prctl(PR_SET_DUMPABLE, 1)
        enter_user_namespace()
    else:
        enter_user_namespace()
        build_root(readable)
    os.chroot(ROOT)
    os.chdir("/")
    if not os.access(os.__file__, os.R_OK):
        raise OSError(f"user {os.geteuid()} cannot read the interpreter's {os.path.dirname(os.__file__)}")


def enter_user_namespace() -> None:
    """Enters new namespaces with all capabilities inside them, as a user that has none outside."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


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
        open(target, "w").close()
    bind_read_only(path, target)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
