"""The kernel's counter of processes that it ended for memory explains the end of a role, for a while."""

import time
from pathlib import Path

import pytest

from pipelinerl.launcher.memory_kills import MemoryKills, psutil, usable_memory

CASES = [
    ("0::/app\n", "app", "memory.events.local", "memory.max"),
    ("0::/as/the/host/names/it\n", "", "memory.events.local", "memory.max"),
    ("9:name=systemd:/\n4:cpu,memory:/app\n0::/\n", "memory/app", "memory.oom_control", "memory.limit_in_bytes"),
    ("4:memory:/as/the/host/names/it\n0::/\n", "memory", "memory.oom_control", "memory.limit_in_bytes"),
]
LIMITS = [(str(3 * 2**29), "1.5 GiB"), ("max", "no limit of its own"), (str(2**63 - 4096), "no limit of its own")]


@pytest.mark.parametrize(("limit", "told"), LIMITS)
@pytest.mark.parametrize(("cgroup", "folder", "counter", "limit_file"), CASES)
def test_rise_of_the_counter_explains_an_end_within_a_minute(
    cgroup: str, folder: str, counter: str, limit_file: str, limit: str, told: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    own, root = tmp_path / "cgroup", tmp_path / "root"
    own.write_text(cgroup)
    place = root / folder
    place.mkdir(parents=True)
    (place / counter).write_text("oom 7\noom_kill 2\n")
    (place / limit_file).write_text(f"{limit}\n")
    total = psutil.virtual_memory().total
    assert usable_memory(own, root) == (min(3 * 2**29, total) if told == "1.5 GiB" else total)
    kills = MemoryKills(own, root)
    assert kills.why("actor") is None
    (place / counter).write_text("oom 8\noom_kill 3\n")
    why = kills.why("actor")
    assert why is not None
    assert told in why
    assert why.endswith(": lower actor.rollout_workers or actor.llm_max_rollouts")
    assert str(kills.why("redis")).endswith(": give it more")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert kills.why("actor") is None


@pytest.mark.parametrize("cgroup", ["", "0::/\n"])
def test_machine_without_a_counter_explains_nothing(cgroup: str, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    assert MemoryKills(tmp_path / "cgroup", tmp_path / "root").why("actor") is None
    assert MemoryKills(tmp_path / "missing", tmp_path / "root").why("actor") is None
