"""Programs that try to leave the sandbox, to harm what judges them, or to make their verdict vanish.

Each prints ``ESCAPED`` when it gets what it wants. None may, and each must be judged.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipelinerl.domains.coding.judge import TestSuite, judge
from pipelinerl.domains.sandbox import Limits
from pipelinerl.domains.sandbox.protocol import ProgramRunner, run_in_turn
from pipelinerl.domains.workspace import JailWorkspace, Workspace, pack_folder
from tests.integration.test_sandbox import usable_modes, warm_sandbox

LIMITS = Limits(cpu_s=2, wall_s=60.0, total_s=120.0, memory_mb=256, disk_mb=16, processes=16, output_kb=64)
PRELUDE = """
import ctypes, fcntl, os, resource, signal, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*arguments):
    return libc.syscall(*[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments])
def escaped(*what):
    print("ESCAPED", *what, flush=True)
def attempt(function, *arguments):
    try:
        function(*arguments)
    except (OSError, ValueError, PermissionError, ProcessLookupError):
        return
    escaped(function, arguments)
"""
X86 = {"clone3": 435, "unshare": 272, "setns": 308, "process_vm_readv": 310, "bpf": 321, "userfaultfd": 323}

ATTACKS = {
    # the supervisor and its limits
    "prlimit of process 1": "attempt(resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1))",
    "prlimit of every pid": """
for pid in range(1, 40_000):
    if pid != os.getpid():
        try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)); escaped(pid)
        except OSError: pass
""",
    "raise own limits": """
for number in range(16):
    if resource.getrlimit(number)[1] != -1: attempt(resource.setrlimit, number, (-1, -1))
""",
    "SIGKILL to process 1": """
try: os.kill(1, signal.SIGKILL)
except PermissionError: pass
""",
    "every signal to process 1": """
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
""",
    "SIGKILL to a process group that is not its own": "attempt(os.killpg, 10**6, 9)",
    "F_SETOWN on standard output": "attempt(fcntl.fcntl, 1, fcntl.F_SETOWN, 1)",
    "F_SETSIG on standard output": "attempt(fcntl.fcntl, 1, fcntl.F_SETSIG, signal.SIGKILL)",
    "F_SETOWN_EX on standard input": "attempt(fcntl.fcntl, 0, 15, struct.pack('ii', 1, 1))",
    "O_ASYNC on standard output": "attempt(fcntl.fcntl, 1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | 0x2000)",
    "FIOASYNC": "attempt(fcntl.ioctl, 1, 0x5452, struct.pack('i', 1))",
    "FIOSETOWN": "attempt(fcntl.ioctl, 1, 0x8901, struct.pack('i', 1))",
    "F_NOTIFY": "attempt(fcntl.fcntl, os.open('.', os.O_RDONLY), 1026, 2)",
    "freeze process 1 through the scheduler": "attempt(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))",
    "move process 1 to no core": "attempt(os.sched_setaffinity, 1, {0})",
    "nice of process 1": "attempt(os.setpriority, os.PRIO_PROCESS, 1, 19)",
    "nice of a user": "attempt(os.setpriority, os.PRIO_USER, 0, 19)",
    "ptrace of process 1": "syscall(101, 16, 1, 0, 0) == 0 and escaped()",
    "read memory of process 1": "syscall(310, 1, 0, 0, 0, 0, 0) >= 0 and escaped()",
    "pidfd of process 1": "attempt(os.pidfd_open, 1)",
    "descriptors of others": """
for number in range(3, 1024):
    try: os.fstat(number); escaped(number)
    except OSError: pass
""",
    "report on every descriptor": """
for number in range(3, 1024):
    try: os.write(number, b'{"ended": "exited", "exit_code": 0}\\n'); escaped(number)
    except OSError: pass
""",
    "close standard streams": "os.close(0); os.close(2)",
    "non-blocking standard output": "os.set_blocking(1, False)",
    # capabilities and namespaces
    "unshare a user namespace": "syscall(272, 0x10000000) == 0 and escaped()",
    "unshare all namespaces": "syscall(272, 0x7E020000) == 0 and escaped()",
    "clone with a user namespace": """
pid = syscall(56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: escaped()
""",
    "clone3": """
arguments = struct.pack("8Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
pid = syscall(435, arguments, len(arguments))
if pid == 0: os._exit(0)
if pid > 0: escaped()
""",
    "setns": "syscall(308, 0, 0) == 0 and escaped()",
    "become root": "attempt(os.setuid, 0 if os.getuid() else 1)",
    "become another user": "attempt(os.setresuid, 65534, 65534, 65534)",
    "drop groups": "attempt(os.setgroups, [0])",
    "chroot": "attempt(os.chroot, '/tmp')",
    "mount": "libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0 and escaped()",
    "unmount": "libc.umount2(b'/sandbox', 2) == 0 and escaped()",
    "remount the root for writing": "libc.mount(None, b'/', None, 32 | 4096, 0) == 0 and escaped()",
    "set-user programs": "os.system('/bin/su -c id 2>/dev/null | grep -q uid=0 && echo ESCAPED')",
    "host name": "syscall(170, b'x', 1) == 0 and escaped()",
    "load bpf": "syscall(321, 0, 0, 0) >= 0 and escaped()",
    "userfaultfd": "syscall(323, 0) >= 0 and escaped()",
    "io_uring": "syscall(425, 1, bytes(120)) >= 0 and escaped()",
    "keyring": "syscall(250, 0, -3) >= 0 and escaped()",
    # files
    "change modes outside": "attempt(os.chmod, '/usr', 0o777)",
    "write in every folder": """
for folder in ("/", "/usr", "/usr/bin", "/etc", "/lib", "/dev", "/root", "/var", "/home", "/dev/shm", "/run", "/sys"):
    try: open(folder + "/new", "w"); escaped(folder)
    except OSError: pass
""",
    "write into the interpreter": """
for path in (os.__file__, sys.executable, ctypes.__file__):
    try: open(path, "ab"); escaped(path)
    except OSError: pass
""",
    "see processes": "attempt(os.listdir, '/proc/1')",
    "leave through ..": "os.path.exists('/'.join(['..'] * 30) + '/etc/passwd') and escaped()",
    "device nodes": "attempt(os.mknod, 'disk', 0o60666, os.makedev(8, 0))",
    "read host secrets": """
for path in ("/etc/shadow", "/root/.ssh", "/run/secrets", "/var/run/secrets", "/proc/self/environ", "/etc/machine-id"):
    try: open(path).read(1); escaped(path)
    except OSError: pass
""",
    # network
    "unix socket of the host": """
import socket
attempt(lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock"))
attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
""",
    "internet socket": "import socket; attempt(socket.create_connection, ('127.0.0.1', 22), 1)",
    "raw socket": "import socket; attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)",
    "name for a pair's end": """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    end, other = socket.socketpair(socket.AF_UNIX, kind)
    attempt(end.bind, "\\0name"); attempt(other.bind, "/tmp/name")
    attempt(end.connect, "\\0name"); attempt(end.sendto, b"x", "\\0name"); attempt(end.listen)
""",
    "lock on a file that all programs share": "attempt(fcntl.flock, open('/usr/bin/env'), fcntl.LOCK_EX)",
    "ask who locks a shared file": """
for command in (5, 36): attempt(fcntl.fcntl, open("/usr/bin/env"), command, struct.pack("hhqqi4x", 1, 0, 0, 1, 0))
""",
    "watch a shared file": "(syscall(294, 0) >= 0 or syscall(253) >= 0) and escaped()",
    "drop a shared file from memory": """
shared = os.open(os.__file__, os.O_RDONLY)
attempt(os.posix_fadvise, shared, 0, 0, os.POSIX_FADV_DONTNEED)
syscall(187, shared, 0, 4096) >= 0 and escaped()
import mmap
pages = mmap.mmap(shared, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)
for advice in (20, 21): attempt(pages.madvise, advice)
""",
    "ask which pages of a shared file are in memory": """
shared = os.open(os.__file__, os.O_RDONLY)
attempt(os.preadv, shared, [bytearray(1)], 0, os.RWF_NOWAIT)
for number in (27, 451): syscall(number, 0, 0, 0, 0); ctypes.get_errno() != 1 and escaped(number)
""",
    # memory and processes
    "large socket buffers": """
import socket
a, b = socket.socketpair()
for option in (7, 8, 32, 33):
    attempt(a.setsockopt, socket.SOL_SOCKET, option, 2**30)
""",
    "descriptors that wait in a socket": """
import socket
a, b = socket.socketpair()
attempt(socket.send_fds, a, [b"x"], [0])
""",
    "shared anonymous memory": """
import mmap
attempt(mmap.mmap, -1, 2**20)
""",
    "pages that a pipe keeps": "syscall(278, -1, 0, 0, 0); ctypes.get_errno() == 9 and escaped()",
    "rules that the kernel keeps": "syscall(444, 0, 0, 1) >= 0 and escaped()",
    "standard input as memory": "attempt(os.write, 0, b'x'); attempt(os.ftruncate, 0, 1 << 20)",
    "memory file": "attempt(os.memfd_create, 'x')",
    "secret memory": "syscall(447, 0) >= 0 and escaped()",
    "System V segment": "libc.shmget(0, 4096, 0o1666) >= 0 and escaped()",
    "message queue": "libc.msgget(0, 0o1666) >= 0 and escaped()",
    "POSIX message queue": "syscall(240, b'q', 0o102, 0o600, 0) >= 0 and escaped()",
    "large pipes": "attempt(fcntl.fcntl, os.pipe()[0], 1031, 1 << 20)",
    "unlinked files": """
held = []
try:
    for i in range(64):
        file = open(f"f{i}", "wb"); os.unlink(f"f{i}"); held.append(file)
        for _ in range(16): file.write(bytes(2**20))
        file.flush()
    escaped()
except OSError: pass
""",
    "daemon that outlives its run": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in (0, 1, 2): os.close(descriptor)
        time.sleep(1000)
    os._exit(0)
""",
    "processes without end": """
try:
    while True:
        if os.fork() == 0: time.sleep(100)
except OSError: pass
""",
    "exit through an abort": "os.abort()",
    "kill everybody": "attempt(os.kill, -1, signal.SIGKILL)",
}


NAMED_SOCKETS = ("unix socket of the host", "name for a pair's end")
"""Sockets of a workspace may have names, in a network of its own: what they reach is in `test_workspace`."""


class CommandRunner:
    """Runs programs as commands of one workspace."""

    def __init__(self, workspace: Workspace):
        self._workspace = workspace

    async def run_python(self, code, stdins):
        async def run(stdin):
            return await self._workspace.run(["python3", "-c", code], stdin=stdin)

        return await run_in_turn(run, stdins)


@pytest.fixture(scope="module", params=[(mode, kind) for mode in usable_modes() for kind in ("program", "command")])
def sandbox(request, tmp_path_factory) -> Iterator[ProgramRunner]:
    mode, kind = request.param
    if kind == "program":
        with warm_sandbox(LIMITS, mode) as sandbox:
            yield sandbox
        return
    limits, empty = replace(LIMITS, limit_addresses=False), pack_folder(tmp_path_factory.mktemp("empty"))
    workspace = asyncio.run(JailWorkspace.make(empty, mode=mode, limits=limits))
    yield CommandRunner(workspace)
    asyncio.run(workspace.remove())


def test_table_has_the_promised_size():
    assert len(ATTACKS) >= 40


@pytest.mark.parametrize("attack", ATTACKS)
async def test_attack_gets_nothing_and_is_judged(sandbox, attack):
    """The attack comes before a right answer in one program and instead of it in another."""
    if attack in NAMED_SOCKETS and isinstance(sandbox, CommandRunner):
        return
    (outcome,) = await sandbox.run_python(PRELUDE + ATTACKS[attack] + "\nprint('end')", [""])
    assert "ESCAPED" not in outcome.stdout, outcome
    assert not outcome.stderr.startswith("Traceback"), outcome.stderr
    suite = TestSuite.from_problem({"inputs": ["1\n"], "outputs": ["2\n"]})
    verdict = await judge(f"```python\n{PRELUDE}{ATTACKS[attack]}\nprint(3)\n```", suite, sandbox)
    assert verdict.status == "wrong", verdict
