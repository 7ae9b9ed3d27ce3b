"""The two modes that isolate programs, and a check that a configured mode is one of them.

| mode | needs | identity of the program |
|---|---|---|
| root | root with CAP_SYS_ADMIN | a separate user for every program |
| user | user namespaces | the jail's user, without its capabilities |

Both give every program a PID and mount namespace, a root file system of read-only system folders and an empty working
folder in memory, no network, no /proc, resource limits, no new privileges and a filter of system calls. The supervisor
runs outside the program's PID namespace, so the program cannot address it. A machine that allows neither mode runs no
programs.
"""

import os
import sys
import sysconfig
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
MODES = ("root", "user")
FIRST_UID, NUM_UIDS = 260_000, 60_000
"""Range of the users that programs run as. Nothing else on a machine uses it."""


def interpreter() -> str:
    """Returns the path of the interpreter itself, not of a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


def readable_paths() -> list[str]:
    """Returns the folders that programs may read besides the system: the interpreter's and the installed packages."""
    return sorted({os.path.realpath(sys.base_prefix), sysconfig.get_path("purelib")})


def check_mode(mode: str) -> str:
    """Returns ``mode``. Raises ``ValueError`` if it is none of ``MODES``, because others do not isolate enough."""
    if mode not in MODES:
        raise ValueError(
            f"sandbox mode {mode!r} does not hold what the sandbox promises (landlock shares the user's processes and "
            "disk with the program, bwrap its supervisor): use 'root' or 'user', or set sandbox_endpoint"
        )
    return mode
