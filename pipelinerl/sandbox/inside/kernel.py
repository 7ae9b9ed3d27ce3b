"""The kernel's isolation calls that Python does not offer: mounts, capabilities, Landlock, seccomp.

Everything here restricts the calling process (and what it starts) and cannot be undone by it.
Standard library only: the jail starts without site-packages.
"""

import ctypes
import errno
import os
import platform
import struct

LIBC = ctypes.CDLL(None, use_errno=True)

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
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
KEPT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048
"""Mount flags that a remount must not lose (statvfs and mount share these values)."""


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int) -> None:
    check(LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def unshare(flags: int) -> None:
    check(LIBC.unshare(flags), "unshare")


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
    header = struct.pack("Ii", 0x20080522, 0)
    check(LIBC.capset(header, bytes(24)), "capset")


# ---- Landlock: https://docs.kernel.org/userspace-api/landlock.html

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
FILE_EXECUTE, FILE_WRITE, FILE_READ, DIR_READ = 1, 2, 4, 8
FILE_TRUNCATE = 1 << 14
ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
READ = FILE_EXECUTE | FILE_READ | DIR_READ


def landlock_abi() -> int:
    """Version of the kernel's Landlock; 0 without it."""
    return max(LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)), 0)


def landlock(readable: list[str], writable: list[str]) -> None:
    """From now on only these trees can be read (and executed) or written."""
    handled = ALL_BY_ABI[min(landlock_abi(), 3)]
    attributes = struct.pack("Q", handled)
    ruleset = check(LIBC.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(8), ctypes.c_uint32(0)), "landlock")
    for paths, access in ((readable, READ), (writable, handled)):
        for path in paths:
            allow_beneath(ruleset, path, access & handled)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    check(LIBC.syscall(LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
    os.close(ruleset)


def allow_beneath(ruleset: int, path: str, access: int) -> None:
    if not os.path.exists(path):
        return
    if not os.path.isdir(path):
        access &= FILE_EXECUTE | FILE_READ | FILE_WRITE | FILE_TRUNCATE
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, descriptor)
        check(LIBC.syscall(LANDLOCK_ADD, ruleset, 1, rule, ctypes.c_uint32(0)), f"landlock rule for {path}")
    finally:
        os.close(descriptor)


# ---- seccomp: a filter that answers EPERM to a list of system calls

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = {
    "x86_64": {
        "socket": 41, "ptrace": 101, "mount": 165, "umount2": 166, "reboot": 169, "swapon": 167, "keyctl": 250,
        "add_key": 248, "request_key": 249, "unshare": 272, "setns": 308, "perf_event_open": 298, "bpf": 321,
        "process_vm_readv": 310, "process_vm_writev": 311, "userfaultfd": 323, "io_uring_setup": 425,
        "open_by_handle_at": 304, "kexec_load": 246, "init_module": 175, "finit_module": 313, "pivot_root": 155,
        "chroot": 161, "pidfd_getfd": 438, "fsopen": 430, "move_mount": 429, "open_tree": 428, "mount_setattr": 442,
        "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "msgget": 68, "semget": 64,
    },
    "aarch64": {
        "socket": 198, "ptrace": 117, "mount": 40, "umount2": 39, "reboot": 142, "swapon": 224, "keyctl": 219,
        "add_key": 217, "request_key": 218, "unshare": 97, "setns": 268, "perf_event_open": 241, "bpf": 280,
        "process_vm_readv": 270, "process_vm_writev": 271, "userfaultfd": 282, "io_uring_setup": 425,
        "open_by_handle_at": 265, "kexec_load": 104, "init_module": 105, "finit_module": 273, "pivot_root": 41,
        "chroot": 51, "pidfd_getfd": 438, "fsopen": 430, "move_mount": 429, "open_tree": 428, "mount_setattr": 442,
        "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "msgget": 186, "semget": 190,
    },
}  # fmt: skip
SIGNALS = {
    "x86_64": {
        "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
        "pidfd_send_signal": 424,
    },
    "aarch64": {
        "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "pidfd_send_signal": 424,
    },
}  # fmt: skip
"""Sending signals: denied where no PID namespace keeps other processes out of reach."""
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
X32_BIT = 0x40000000


def seccomp_program(machine: str, *, signals: bool) -> list[tuple[int, int, int, int]]:
    """BPF: another architecture or the x32 interface kills; a denied call fails with EPERM; all else is allowed."""
    numbers = sorted([*DENIED[machine].values(), *(() if signals else SIGNALS[machine].values())])
    program = [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
        (JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
    ]
    for index, number in enumerate(numbers):
        program.append((JUMP_EQUAL, len(numbers) - index, 0, number))
    return [*program, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]


def seccomp_deny(*, signals: bool) -> None:
    """No sockets, tracing, mounts, memory that no limit counts, or kernel interfaces that a program has no use for.

    No signals either, unless allowed.
    """
    program = seccomp_program(platform.machine(), signals=signals)
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    check(LIBC.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), header, 0, 0), "seccomp")
