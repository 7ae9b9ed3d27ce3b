"""The groups in which the kernel counts a sandboxed run's memory: where they can be made, and what is written there."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipelinerl.domains.sandbox.runner import INSIDE

MIB = 1 << 20
FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cgroup.procs")


@pytest.fixture(scope="module")
def groups() -> ModuleType:
    """The module, which the jail imports without the framework."""
    spec = importlib.util.spec_from_file_location("memory_group", INSIDE / "memory_group.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("cgroup", "mounts", "expected"),
    [
        ("0::/\n", ["/ /sys/fs/cgroup - cgroup2"], ["/sys/fs/cgroup"]),
        (
            "0::/user.slice/run.scope\n",
            ["/ / - ext4", "/ /sys/fs/cgroup - cgroup2"],
            ["/sys/fs/cgroup/user.slice/run.scope", "/sys/fs/cgroup/user.slice"],
        ),
        ("0::/docker/a\n", ["/docker/a /sys/fs/cgroup - cgroup2"], ["/sys/fs/cgroup"]),
        ("0::/docker/a/b\n", ["/docker/a /sys/fs/cgroup - cgroup2"], ["/sys/fs/cgroup/b", "/sys/fs/cgroup"]),
        ("0::/docker/ab\n", ["/docker/a /sys/fs/cgroup - cgroup2"], []),
        ("4:memory:/a\n0::/a\n", ["/ /sys/fs/cgroup/memory - cgroup"], []),
        ("4:memory:/a\n", ["/ /sys/fs/cgroup - cgroup2"], []),
    ],
)
def test_groups_are_made_in_the_own_group_or_the_one_above_it(
    groups: ModuleType, cgroup: str, mounts: list[str], expected: list[str]
) -> None:
    lines = []
    for mount in mounts:
        root, point, _, kind = mount.split()
        lines.append(f"30 24 0:26 {root} {point} rw,nosuid shared:9 - {kind} none rw")
    assert groups.parents(cgroup, "\n".join(lines)) == expected


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `mkdir` makes a group's files, as the kernel does."""
    make = os.mkdir

    def make_group(name: str, *, dir_fd: int) -> None:
        make(name, dir_fd=dir_fd)
        for file in FILES:
            (tmp_path / name / file).touch()
        (tmp_path / name / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 0\n")

    monkeypatch.setattr(os, "mkdir", make_group)
    return tmp_path


def open_tree(tree: Path) -> int:
    return os.open(tree, os.O_RDONLY | os.O_DIRECTORY)


def test_group_has_the_limits_of_the_run_and_says_whether_the_kernel_ended_it(groups: Any, tree: Path) -> None:
    folder = open_tree(tree)
    group = groups.MemoryGroup(folder, "run-1", memory_bytes=160 * MIB, processes=32)
    group.enter()
    written = {file: (tree / "run-1" / file).read_text() for file in FILES}
    assert written == {
        "memory.max": "167772160",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "32",
        "cgroup.procs": "0",
    }
    assert not group.was_full()
    (tree / "run-1" / "memory.events").write_text("low 0\nhigh 0\nmax 900\noom 2\noom_kill 3\n")
    assert group.was_full()
    assert group.processes() == [0]
    (tree / "run-1" / "cgroup.procs").write_text("12\n345\n")
    assert group.processes() == [12, 345]
    os.close(folder)


def test_group_without_a_memory_controller_is_refused_and_removed(groups: Any, tmp_path: Path) -> None:
    folder = open_tree(tmp_path)
    with pytest.raises(FileNotFoundError):
        groups.MemoryGroup(folder, "run-1", memory_bytes=MIB, processes=1)
    assert list(tmp_path.iterdir()) == []
    os.close(folder)
