"""By which means programs are isolated, and which of them this machine allows.

| mode | needs | identity of the program |
|---|---|---|
| root | root with CAP_SYS_ADMIN | an own user for every program |
| user | user namespaces | the jail's user, without its capabilities |

Both give every program a PID and mount namespace, a root file system of read-only system folders and an empty working
folder in memory, no network, no /proc, resource limits, no new privileges and a filter of system calls. The supervisor
lies outside the program's PID namespace, so the program cannot address it. A machine that allows neither runs no
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
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


def readable_paths() -> list[str]:
    """Folders that programs may read besides the system: the interpreter's own and the installed packages."""
    return sorted({os.path.realpath(sys.base_prefix), sysconfig.get_path("purelib")})


def check_mode(mode: str) -> str:
    """Returns the mode; raises ``ValueError`` for one that does not hold what the sandbox promises."""
    if mode not in MODES:
        raise ValueError(
            f"sandbox mode {mode!r} does not hold what the sandbox promises (landlock shares the user's processes and "
            "disk with the program, bwrap its supervisor): use 'root' or 'user', or set sandbox_endpoint"
        )
    return mode
