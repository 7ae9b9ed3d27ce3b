"""The filter of system calls (seccomp), which a program cannot remove. A denied call fails with EPERM.

Denied are sockets with an address, tracing, mounts, namespaces, memory that no limit counts (``vmsplice`` keeps two
megabytes with every page that it gives to a pipe), calls that name another process, locks and watches on shared files,
calls that drop pages of shared files from memory or ask which are there, and kernel interfaces that no program needs.
``socketpair`` is allowed, with buffers of the kernel's default size. In a workspace, whose network is its own, so are
the streams of ``SOCKETS``.
"""

import ctypes
import errno
import os
import struct

from kernel import LIBC, PR_SET_NO_NEW_PRIVS, check, prctl

PR_SET_SECCOMP = 22
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}
DENIED = {
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269), "flock": (73, 32), "inotify_init": (253, 26),
    "inotify_init1": (294, 26), "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "unshare": (272, 97), "setns": (308, 268), "perf_event_open": (298, 241),
    "bpf": (321, 280), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "userfaultfd": (323, 282),
    "vmsplice": (278, 75), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "kexec_load": (246, 104),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "pivot_root": (155, 41),
    "chroot": (161, 51), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "kcmp": (312, 272), "process_madvise": (440, 440), "process_mrelease": (448, 448), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "fanotify_init": (300, 262), "quotactl": (179, 60), "acct": (163, 89),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "personality": (135, 92), "fadvise64": (221, 223), "readahead": (187, 213), "mincore": (27, 232),
    "cachestat": (451, 451),
}  # fmt: skip
"""Denied calls, with their numbers on x86_64 and aarch64."""
SOCKETS = ("socket", "bind", "connect", "listen", "accept", "accept4")
"""Calls of a workspace. Descriptors and datagrams with an address stay denied: no limit counts what waits in them."""
NAMESPACE_FLAGS = 0x7E020000
ANY = None
WHOLE = 0xFFFFFFFF
Instruction = tuple[int, int, int, int]
ArgumentTest = tuple[int, int, int | None]
CONDITIONAL: dict[str, tuple[tuple[int, int], list[list[ArgumentTest]]]] = {
    "clone": ((56, 220), [[(0, NAMESPACE_FLAGS, ANY)]]),
    "mmap": ((9, 222), [[(3, 0x21, 0x21)]]),
    "fcntl": (
        (72, 25),
        [
            [(1, WHOLE, 4), (2, 0x2000, ANY)],
            [(1, WHOLE, 5)],
            [(1, WHOLE, 8)],
            [(1, WHOLE, 10)],
            [(1, WHOLE, 15)],
            [(1, WHOLE, 36)],
            [(1, WHOLE, 1024)],
            [(1, WHOLE, 1026)],
            [(1, WHOLE, 1031)],
        ],
    ),
    "sendto": ((44, 206), [[(5, WHOLE, ANY)]]),
    "setsockopt": ((54, 208), [[(1, WHOLE, 1), (2, WHOLE, option)] for option in (7, 8, 32, 33)]),
    "ioctl": ((16, 29), [[(1, WHOLE, request)] for request in (0x5452, 0x8901, 0x8902, 0x5412, 0x541C)]),
    "madvise": ((28, 233), [[(2, WHOLE, 20)], [(2, WHOLE, 21)]]),
    "preadv2": ((327, 286), [[(5, WHOLE, ANY)]]),
    "prlimit64": ((302, 261), [[(0, WHOLE, ANY)]]),
    "sched_setaffinity": ((203, 122), [[(0, WHOLE, ANY)]]),
    "sched_setscheduler": ((144, 119), [[(0, WHOLE, ANY)]]),
    "sched_setparam": ((142, 118), [[(0, WHOLE, ANY)]]),
    "sched_setattr": ((314, 274), [[(0, WHOLE, ANY)]]),
    "get_robust_list": ((274, 100), [[(0, WHOLE, ANY)]]),
    "setpriority": ((141, 140), [[(0, WHOLE, ANY)], [(1, WHOLE, ANY)]]),
    "ioprio_set": ((251, 30), [[(0, 0xFFFFFFFE, ANY)], [(1, WHOLE, ANY)]]),
}
"""Calls that are denied if all tests ``(argument, mask, value)`` of one list hold. ``ANY``: any bit of the mask is set.

- clone is denied new namespaces.
- mmap is denied shared anonymous memory, because it outlives its resident pages, which the limits count.
- fcntl is denied F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ and O_ASYNC, and F_GETLK and
  F_OFD_GETLK, which show locks of other programs on shared files.
- sendto is denied an address, by its length.
- setsockopt is denied SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE and SO_RCVBUFFORCE: no limit counts what they hold.
- ioctl is denied FIOASYNC, FIOSETOWN, SIOCSPGRP, TIOCSTI and TIOCLINUX.
- madvise is denied MADV_COLD and MADV_PAGEOUT, and preadv2 its flags (RWF_NOWAIT).
- The other calls are denied for every process but the caller.
"""
FAMILIES: tuple[tuple[int, int], list[list[ArgumentTest]]] = (DENIED["socket"], [[(0, ~3 & WHOLE, ANY)], [(0, 3, 3)]])
"""The families of a workspace's sockets: AF_UNIX is 1, AF_INET is 2."""
CLONE3 = 435
"""The filter cannot read the flags of this call, because they lie in memory. So it fails with ENOSYS, as on older
kernels, and libc uses ``clone`` instead."""
LOAD, AND, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_SET, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, DENY, MISSING = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
X32_BIT = 0x40000000


def filter_program(machine: str, *, sockets: bool = False) -> list[Instruction]:
    """Returns the BPF program for ``x86_64`` or ``aarch64``. It allows every call that is not denied.

    A call of another architecture or of the x32 ABI kills the process. ``sockets``: for a workspace.
    """
    denied = [numbers for name, numbers in DENIED.items() if not (sockets and name in SOCKETS)]
    conditional = [*CONDITIONAL.values(), *([FAMILIES] if sockets else [])]
    column = COLUMN[machine]
    program = [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
        (JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
        (JUMP_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, MISSING),
    ]
    for numbers in denied:
        program += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, DENY)]
    for numbers, rules in conditional:
        block = [instruction for tests in rules for instruction in denied_when(tests)] + [(RETURN, 0, 0, ALLOW)]
        program += [(JUMP_EQUAL, 0, len(block), numbers[column]), *block]
    return [*program, (RETURN, 0, 0, ALLOW)]


def denied_when(tests: list[ArgumentTest]) -> list[Instruction]:
    """Returns a block that denies if every test holds and otherwise continues after the block."""
    block: list[Instruction] = [(RETURN, 0, 0, DENY)]
    for argument, mask, value in reversed(tests):
        load = (LOAD, 0, 0, 16 + 8 * argument)
        if value is ANY:
            block = [load, (JUMP_SET, 0, len(block), mask), *block]
        else:
            block = [load, (AND, 0, 0, mask), (JUMP_EQUAL, 0, len(block), value), *block]
    return block


class CallFilter:
    """The compiled filter for this machine. Any number of processes can apply it."""

    def __init__(self, *, sockets: bool = False) -> None:
        program = filter_program(os.uname().machine, sockets=sockets)
        code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
        self._code = ctypes.create_string_buffer(code)
        self._header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(self._code))

    def apply(self) -> None:
        """Restricts the calling process and all its children. Raises ``OSError`` if the kernel refuses."""
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        check(LIBC.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), self._header, 0, 0), "seccomp")
