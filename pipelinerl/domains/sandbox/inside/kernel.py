"""The kernel's isolation calls that Python does not offer: namespaces, mounts, capabilities.

Every call restricts the calling process and its children, and they cannot undo it.
Standard library only: the jail starts without the framework.
"""

import ctypes
import os
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
PRCTL, CAPSET, SIGNAL = LIBC.prctl, LIBC.capset, LIBC.signal
"""Looked up once, because a look-up writes to eighty pages in every process."""

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
KEPT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048
"""Mount flags that a remount must keep (statvfs and mount have the same values)."""
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int) -> None:
    check(PRCTL(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def ignore(number: int) -> None:
    """Ignores a signal without telling the interpreter, which would write to forty pages for its own records."""
    SIGNAL(int(number), 1)


def unshare(flags: int) -> None:
    check(LIBC.unshare(flags), "unshare")


def pivot_root(path: str) -> None:
    """Makes the mount at ``path`` the root of the mount namespace, and unmounts the old root."""
    os.chdir(path)
    check(LIBC.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), f"pivot_root {path}")
    check(LIBC.umount2(b".", MNT_DETACH), "unmount of the old root")
    os.chdir("/")


def map_own_user(folder: int, uid: int, gid: int) -> None:
    """Maps user and group to themselves in the caller's user namespace. ``folder``: a /proc that shows the caller."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=folder)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    result = LIBC.mount(encoded(source), encoded(target), encoded(kind), ctypes.c_ulong(flags), encoded(data))
    check(result, f"mount {source} on {target}")


def bind_read_only(source: str, target: str) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    kept = os.statvfs(source).f_flag & KEPT_FLAGS
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def drop_capabilities() -> None:
    """Drops all capabilities."""
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, of this thread
    check(CAPSET(header, bytes(24)), "capset")
