"""Replacement of a file: the old content or the new, and no temporary file after an error."""

import os
import stat
from pathlib import Path

import pytest

from pipelinerl.world.disk import make_folder, matching, plain_path, replace_file, replacement


@pytest.mark.parametrize("sync", [False, True])
def test_file_is_replaced_and_gets_its_mode(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "state.json"
    path.write_text("old")
    replace_file(path, "né", mode=0o600, sync=sync)
    assert path.read_bytes() == "né".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_file_stays_as_it_is_until_the_block_ends_and_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "points"
    path.write_bytes(b"old")
    with replacement(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"

    def fail() -> None:
        with replacement(path) as file:
            file.write(b"half")
            raise OSError("the disk is full")

    pytest.raises(OSError, fail)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_made_with_their_parents(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("name", ["run[1]", "run*", "what?", "[a-z]"])
def test_folder_named_like_a_pattern_is_itself(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "data"
    folder.mkdir(parents=True)
    (tmp_path / "run1" / "data").mkdir(parents=True)
    (tmp_path / "run1" / "data" / "other.jsonl").touch()
    rows = [folder / "a.jsonl", folder / "b[1].jsonl"]
    for path in rows:
        path.touch()
    assert matching(f"{folder}/*.jsonl") == [str(path) for path in rows]
    assert matching(f"{tmp_path}/run[0-9]/**/*.jsonl") == [str(tmp_path / "run1" / "data" / "other.jsonl")]
    assert matching(f"{folder}/*.csv") == []


@pytest.mark.parametrize("name", ["run[1]/model", "run/model[1]", "a*/b?"])
def test_library_that_takes_paths_for_patterns_gets_a_link(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    link = Path(plain_path(str(folder)))
    assert not set("[]*?") & set(str(link))
    assert os.path.samefile(link, folder)
    assert [path.name for path in link.glob("*.json")] == ["config.json"]


def test_other_texts_get_no_link(tmp_path: Path) -> None:
    for text in ("Qwen/Qwen2.5-7B", str(tmp_path), "[1, 2]", '{"backend": "staged"}'):
        assert plain_path(text) == text
