"""Finds processes of this container that the kernel killed for memory, by its cgroup's counter (versions 1 and 2).

Programs in the sandbox have cgroups and counters of their own.
"""

import contextlib
import time
from pathlib import Path

import psutil

RECENT_S = 60.0
"""A role ends within this time after the kernel has killed a process of it, such as its engine."""
FILES = (("memory.events.local", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes"))
"""Counter and limit of either version."""
NO_LIMIT = 2**60
"""Version 1 has a number near 2**63 for no limit."""
LOWER = {
    "actor": "actor.rollout_workers or actor.llm_max_rollouts",
    "actor_llm": "vllm_config.vllm_kwargs.max_model_len, or take a smaller model",
    "preprocessor_llm": "vllm_config.vllm_kwargs.max_model_len, or take a smaller model",
    "preprocessor": "finetune.seq_length or finetune.train_batch_size",
    "finetune": "finetune.seq_length, switch finetune.cpu_offload off, or take a smaller model",
    "verifier": "verifier.workers or verifier.memory_mb",
}
"""Settings that reduce memory, by kind of role."""


def usable_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory of this machine, or of this container if it has fewer. Arguments: as of `MemoryKills`."""
    files = find_files(own, root)
    limit = read(files[1]).strip() if files else ""
    return min(psutil.virtual_memory().total, int(limit) if limit.isdigit() else NO_LIMIT)


class MemoryKills:
    """Follows the counter. Call `look` regularly, so that only recent kills explain an exit.

    Args:
        own: file with the cgroup of this process.
        root: where cgroups are mounted.
    """

    def __init__(self, own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")):
        self._files = find_files(own, root)
        self._seen = self._count()
        self._risen = -RECENT_S

    def look(self) -> None:
        if (count := self._count()) > self._seen:
            self._seen, self._risen = count, time.monotonic()

    def why(self, kind: str) -> str | None:
        """Return why a role of this kind has ended, if the kernel killed a process within `RECENT_S`."""
        self.look()
        if time.monotonic() - self._risen >= RECENT_S:
            return None
        fix = f"lower {LOWER[kind]}" if kind in LOWER else "give it more"
        return f"the kernel killed a process for memory, and this container has {self._limit_text()}: {fix}"

    def _count(self) -> int:
        lines = read(self._files[0]).splitlines() if self._files else []
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def _limit_text(self) -> str:
        limit = read(self._files[1]).strip() if self._files else ""
        is_limited = limit.isdigit() and int(limit) < NO_LIMIT
        return f"{int(limit) / 2**30:.1f} GiB" if is_limited else "no limit of its own (its machine or pod was full)"


def find_files(own: Path, root: Path) -> tuple[Path, Path] | None:
    """Return the counter and the limit of this process's cgroup."""
    for line in read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in (root / "memory", root):
            for folder in (mount / path.lstrip("/"), mount):  # in a container the path may be the host's
                for counter, limit in FILES:
                    if (folder / counter).is_file():
                        return folder / counter, folder / limit
    return None


def read(path: Path) -> str:
    """Return the file's text. Empty if there is none."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""
