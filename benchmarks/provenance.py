"""Where and from which code a result comes: every benchmark that records its machine or its commit asks here."""

import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def machine() -> str:
    """Architecture, cores, memory and the load of the last minute, as in "x86_64, 2 cores, 24 GiB, load 0.4"."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, load {os.getloadavg()[0]:.1f}"


def commit(root: Path = ROOT) -> str:
    """12 digits of the commit, with ``+`` if files other than results differ from it. "unknown" without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout

    try:
        # A benchmark that writes its results as they come does not change the code that it measures.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!*.json")
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
