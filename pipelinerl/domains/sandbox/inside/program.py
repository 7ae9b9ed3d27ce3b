"""The program's process: it takes its descriptors, drops all other rights, and runs the code as a script.

Nothing in this process is trusted after `execute` begins, because the code may change everything in it.
"""

import atexit
import builtins
import gc
import io
import os
import resource
import signal
import sys
import types
from collections.abc import Sequence

from kernel import PR_SET_PDEATHSIG, drop_capabilities, prctl
from syscalls import CallFilter

FILE = "solution.py"
MAX_DESCRIPTORS = 128
"""Open files of a process. It bounds what sockets may hold: 128 times 320 kB."""
OWN_MODULES = ("__main__", "kernel", "memory_group", "program", "supervisor", "syscalls")


def become(standard: Sequence[int], limits: dict, uid: int | None, folder: str, calls: CallFilter) -> None:
    """Irrevocably turns this process into a confined one with ``standard`` as its input, output and error output."""
    os.setsid()
    for target, descriptor in enumerate(standard):
        os.dup2(descriptor, target)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(folder)
    disk = limits["disk_mb"] << 20
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_mb"] << 20 if limits["limit_addresses"] else resource.RLIM_INFINITY),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, MAX_DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
    ):
        highest = resource.getrlimit(name)[1]  # this machine's, which only root may raise
        lower = min(value, highest, key=lambda limit: limit % 2**64)  # RLIM_INFINITY is -1
        resource.setrlimit(name, (lower, lower))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    drop_capabilities()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    calls.apply()


def execute_command(command: list[str], environment: dict[str, str]) -> None:
    """Turns this process into the command, as a shell does. A command that cannot run has status 127."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an interpreter ignores it
    os.set_inheritable(0, True)  # dup2 keeps the flag of a descriptor that already is 0
    try:
        os.execvpe(command[0], command, {**os.environ, **environment})
    except (OSError, TypeError, ValueError) as failure:  # a NUL in an argument is a ValueError
        os.write(2, f"{command[0]}: {failure.args[-1]}\n".encode(errors="replace"))
    os._exit(127)


def execute(code: str) -> None:
    """Runs the code as ``python solution.py`` does, and ends the process with its exit code."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=FILE, __builtins__=builtins)
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    sys.modules["__main__"], sys.argv = main, [FILE]
    sys.path.insert(0, os.getcwd())
    gc.enable()
    status = 0
    try:
        exec(compile(code, FILE, "exec", optimize=0), main.__dict__)  # whose tests may be assertions
    except SystemExit as leaving:
        status = exit_status(leaving)
    except BaseException as failure:  # noqa: BLE001 — of the program: printed as an interpreter does
        failure.__traceback__ = failure.__traceback__ and failure.__traceback__.tb_next
        sys.excepthook(type(failure), failure, failure.__traceback__)
        status = 1
    os._exit(finish(main, status))


def open_standard_streams() -> None:
    """Opens the standard streams as the interpreter does at its start, once in the jail for all programs.

    They are opened on a memory file and pipes, as in a program, because Python tests then whether a stream can seek.
    """
    kept = [os.dup(descriptor) for descriptor in range(3)]
    inbox, (outlet, end) = os.memfd_create("stdin"), os.pipe()
    for target, descriptor in enumerate((inbox, end, end)):
        os.dup2(descriptor, target)
    streams = {
        "stdin": stream(0, "r", "surrogateescape"),
        "stdout": stream(1, "w", "surrogateescape"),
        "stderr": stream(2, "w", "backslashreplace", line_buffering=True),
    }
    for name, opened in streams.items():
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    for target, descriptor in enumerate(kept):
        os.dup2(descriptor, target)
    for descriptor in (*kept, inbox, outlet, end):
        os.close(descriptor)


def stream(descriptor: int, mode: str, errors: str, *, line_buffering: bool = False) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, mode, closefd=False)
    buffered = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, encoding="utf-8", errors=errors, line_buffering=line_buffering)


def exit_status(leaving: SystemExit) -> int:
    """Returns the exit status of an interpreter. Prints an exit code that is not a number, as it does."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def finish(main: types.ModuleType, status: int) -> int:
    """Ends as the interpreter does: waits for threads, calls exit handlers, closes files, flushes. Returns a status."""
    try:
        if threading := sys.modules.get("threading"):
            threading._shutdown()  # noqa: SLF001 — as the interpreter ends
        atexit._run_exitfuncs()  # noqa: SLF001 — os._exit runs no handlers
        main.__dict__.clear()
        sys.stdout.flush()
    except BrokenPipeError:
        return 120
    except BaseException as failure:  # noqa: BLE001 — of the program's own exit handlers
        sys.excepthook(type(failure), failure, failure.__traceback__)
        return status or 120
    return status
