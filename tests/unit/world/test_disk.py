"""Replacement of a file: the old content or the new, and no temporary file after an error."""

import stat
from pathlib import Path

import pytest

from pipelinerl.world.disk import make_folder, replace_file, replacement


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
