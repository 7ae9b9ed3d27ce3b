"""By which means programs are isolated, and which of them this machine allows.

| mode | files | network | what it leaves behind |
|---|---|---|---|
| bwrap | bubblewrap's namespaces | network namespace + call filter | PID namespace |
| namespaces | a root of its own, in memory | network namespace + call filter | PID namespace |
| landlock | Landlock rules | call filter | subreaper, and no signals |

All of them: a scrubbed environment, resource limits, no new privileges, a filter of system calls, and a user of its own
where the caller is root. A machine that allows none of them runs no programs.
"""

import os
import secrets
import shutil
import sys
import sysconfig
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
WORK = "/sandbox"
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
MODES = ("bwrap", "namespaces", "landlock")
FIRST_UID, NUM_UIDS = 260_000, 60_000


def interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


def readable_paths() -> list[str]:
    """What programs may read besides the system: the interpreter's own folder and the installed packages."""
    return sorted({os.path.realpath(sys.base_prefix), sysconfig.get_path("purelib")})


def jail_command(mode: str, disk_mb: int) -> list[str]:
    """Command line that starts the jail in ``mode``."""
    jail = [interpreter(), "-S", "-E", "-B", str(INSIDE / "jail.py")]
    return [*bwrap_command(disk_mb), *jail] if mode == "bwrap" else jail


def bwrap_command(disk_mb: int) -> list[str]:
    executable = shutil.which("bwrap")
    if executable is None:
        raise FileNotFoundError("bwrap is not installed")
    command = [executable, "--die-with-parent", "--new-session"]
    command += [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts")]
    if os.geteuid() == 0:
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN"):
            command += ["--cap-add", capability]
    size = str(disk_mb << 20)
    for path in ("/tmp", WORK):
        command += ["--size", size, "--tmpfs", path]
    for path in (*SYSTEM_PATHS, *readable_paths()):
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind", str(INSIDE), str(INSIDE), "--proc", "/proc", "--dev", "/dev"]
    return [*command, "--remount-ro", "/", "--chdir", WORK]


def draw_uid() -> int | None:
    """A user of its own where we are root; drawn, so that programs of several processes share no limits."""
    return FIRST_UID + secrets.randbelow(NUM_UIDS) if os.geteuid() == 0 else None
