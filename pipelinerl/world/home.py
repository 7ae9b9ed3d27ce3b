"""A home and caches that this process may write, for any user: an unknown user id, `HOME=/`, a read-only home.

Libraries compile and download to folders below `~`, and some fail if they cannot write there. A home that can only be
read stays, because it may hold credentials and models, and only its caches move.
"""

import contextlib
import os
import pwd
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipelinerl.errors import ConfigError

COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
HUB = "HF_HOME"
CACHES = (
    (HUB, "{cache}/huggingface", ""),
    ("HF_DATASETS_CACHE", "{hub}/datasets", ""),
    ("HF_MODULES_CACHE", "{hub}/modules", ""),
    (COMPILER_CACHE, "{cache}/pipelinerl/inductor", ""),
    ("PIPELINERL_CACHE", "{cache}/pipelinerl", ""),
    ("VLLM_CACHE_ROOT", "{cache}/vllm", ""),
    ("TORCH_HOME", "{cache}/torch", ""),
    ("TORCH_EXTENSIONS_DIR", "{home}/.cache/torch_extensions", ""),
    ("TVM_FFI_CACHE_DIR", "{home}/.cache/tvm-ffi", ""),
    ("FLASHINFER_WORKSPACE_BASE", "{home}", ".cache/flashinfer"),
    ("TRITON_CACHE_DIR", "{home}/.triton/cache", ""),
    ("MPLCONFIGDIR", "{config}/matplotlib", ""),
    ("XDG_CACHE_HOME", "{cache}", ""),
    ("XDG_CONFIG_HOME", "{config}", ""),
)
"""A variable, the folder that it names by default, and where below that folder its library writes."""
USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""`getpass.getuser` reads them before the entry of the user, which an unknown user id does not have."""


def writable_folders(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that complete the environment `env`: a user name, a home, and caches that can be written.

    The folder of torch's compiler is always among them, because it outlives the run: else every run would compile
    vLLM's log-probability kernel again, which takes a core about 14 seconds.
    """
    name, home = _user(env)
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    places = {
        "home": home,
        "cache": cache,
        "config": env.get("XDG_CONFIG_HOME") or f"{home}/.config",
        "hub": env.get(HUB) or f"{cache}/huggingface",
    }
    usual = {variable: env.get(variable) or default.format(**places) for variable, default, _ in CACHES}
    usual = {variable: re.sub("^~(?=/|$)", lambda _: home, path) for variable, path in usual.items()}
    kept = {variable for variable, _, below in CACHES if can_write(Path(usual[variable], below))}
    if can_read(usual[HUB]):
        kept.add(HUB)
    found = {} if any(env.get(variable) for variable in USER_VARIABLES) else {"USER": name}
    if kept == set(usual) and is_home(home):
        return found | {"HOME": home, COMPILER_CACHE: usual[COMPILER_CACHE]}
    elsewhere = own_temporary_folder()
    found |= {variable: path if variable in kept else f"{elsewhere}/{variable}" for variable, path in usual.items()}
    return found | {"HOME": home if is_home(home) else str(elsewhere)}


def _user(env: Mapping[str, str]) -> tuple[str, str]:
    """Return name and home of this process's user. A user id without an entry (in a container) has the home `/`."""
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return f"user{os.getuid()}", env.get("HOME") or "/"
    return entry.pw_name, env.get("HOME") or entry.pw_dir


def is_home(folder: str) -> bool:
    """Whether a user can have files of their own in this folder."""
    return folder != "/" and can_read(folder)


def can_read(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)


def can_write(folder: Path) -> bool:
    """Whether this process can make files in the folder, or can make the folder."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    return os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)


def temporary_folder() -> str:
    """Return the folder of this machine's temporary files.

    Raises:
        ConfigError: there is none, as with a root file system that can only be read.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"{error.strerror}: set TMPDIR to a folder that can be written") from error


def own_temporary_folder() -> Path:
    """Return a temporary folder that only this user can write. The next process finds it again."""
    folder = Path(temporary_folder(), f"pipelinerl-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_own else Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
