"""Where a recorded result comes from."""

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.provenance import commit, machine


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commit_is_marked_when_code_differs_from_it_and_not_when_results_do(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name in ("code.py", "result.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    hash_ = git(tmp_path, "rev-parse", "HEAD")[:12]
    (tmp_path / "result.json").write_text("2")
    assert commit(tmp_path) == hash_
    (tmp_path / "code.py").write_text("2")
    assert commit(tmp_path) == f"{hash_}+"


def test_commit_of_a_folder_without_history_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) == "unknown"


def test_machine_names_processor_cores_memory_and_load() -> None:
    assert re.fullmatch(r"\w+, \d+ cores, \d+ GiB, load \d+\.\d", machine())
